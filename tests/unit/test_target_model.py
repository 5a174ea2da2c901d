"""The compact decoder against transformers, through the paged cache and every mix of a ragged step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.errors import SettingsError
from scheduler.wire import Extension, Plan, SamplingParams
from verifier import native
from verifier import weights as target_files
from verifier.architecture import parse_architecture, read_architecture
from verifier.attention import Span, split_spans
from verifier.batch import kept_rows, pack
from verifier.config import VerifierConfig
from verifier.native_step import AttentionStep, Rows
from verifier.runner import TargetRunner
from verifier.weights import load_target, resolve_model

GREEDY = SamplingParams(temperature=0.0)


def extension(
    name: str, ids: list[int], start: int, stop: int, table: np.ndarray, *, num_draft: int = 0, samples: bool = True
) -> Extension:
    return Extension(
        request_id=name,
        start=start,
        token_ids=np.array(ids[start:stop], dtype=np.int32),
        num_draft=num_draft,
        samples=samples,
        block_ids=table[: -(-stop // 16)],
        params=GREEDY,
        output_index=0,
    )


def reference(
    folder: Path, ids: list[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """transformers' logits [n, V] and hidden states after each layer [n, d]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], [h[0] for h in out.hidden_states]


def run(runner: TargetRunner, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions of the sampled rows, their logits, and all features."""
    batch = pack(plan, runner.kv.block_size, runner.device)
    with torch.inference_mode():
        hidden, features = runner._forward(batch, capture=True)
        logits = runner._logits(batch, hidden)
    assert features is not None
    return batch.positions[batch.sampled_rows], logits, features


def two_request_plans(ids: list[int]) -> list[Plan]:
    """Two requests whose prompts, decodes and drafts overlap in every way: chunks, single tokens, drafts of unequal length."""
    a, b = np.array([5, 2, 9, 7, 1], dtype=np.int32), np.array([21, 30, 22, 23, 24], dtype=np.int32)
    n = len(ids)
    return [
        Plan(0, (extension("a", ids, 0, 20, a, samples=False), extension("b", ids, 0, 5, b, samples=False))),
        Plan(1, (extension("a", ids, 20, 27, a, num_draft=3), extension("b", ids, 5, 50, b))),
        Plan(2, (extension("b", ids, 50, 51, b), extension("a", ids, 27, n, a, num_draft=n - 28))),
        Plan(3, (extension("b", ids, 51, 58, b, num_draft=6),)),
    ]


def test_every_family_agrees_with_transformers_through_ragged_paged_steps(family_target: Path) -> None:
    ids = torch.randint(2, 64, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, hidden = reference(family_target, ids)
    runner = TargetRunner(
        VerifierConfig(str(family_target), dtype="float32", device="cpu", capture_layers=(-1, 0, 1), num_threads=1)
    )
    for plan in two_request_plans(ids):
        positions, got, features = run(runner, plan)
        rows = torch.cat([torch.arange(e.start, e.start + len(e.token_ids)) for e in plan.extensions])
        torch.testing.assert_close(features, torch.cat([hidden[i][rows] for i in (0, 1, 2)], -1), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(got, logits[positions], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_rotary_positions_agree_with_transformers(
    rope: dict[str, object], tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    folder = write_target(tmp_path, "llama", rope_parameters=rope)
    ids = list(range(2, 62))
    logits, _ = reference(folder, ids)
    runner = TargetRunner(
        VerifierConfig(str(folder), dtype="float32", device="cpu", capture_layers=(0,), num_threads=1)
    )
    for plan in two_request_plans(ids):
        positions, got, _ = run(runner, plan)
        torch.testing.assert_close(got, logits[positions], atol=2e-4, rtol=1e-4)


def test_untied_head_sharded_weights_and_biases_are_read(tmp_path: Path, write_target: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_target(tmp_path / "whole", "llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    ids = list(range(2, 62))
    logits, _ = reference(folder, ids)
    runner = TargetRunner(
        VerifierConfig(str(sharded), dtype="float32", device="cpu", capture_layers=(0,), num_threads=1)
    )
    for plan in two_request_plans(ids):
        positions, got, _ = run(runner, plan)
        torch.testing.assert_close(got, logits[positions], atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(native.load() is None, reason="no AVX512-BF16 or no C compiler")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (16, 2, 128), (8, 1, 64)])
def test_native_attention_equals_softmax_over_exactly_the_visible_keys(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    spans = [(5, 3), (100, 1), (37, 8), (0, 20), (31, 1), (32, 1), (63, 2)]
    generator = torch.Generator().manual_seed(heads)
    num_rows, block_size, num_blocks = sum(n for _, n in spans), 16, 64
    pool = torch.randn(num_blocks, block_size, 2 * kv_heads, head_dim, generator=generator).bfloat16()
    qkv = torch.randn(num_rows, heads + 2 * kv_heads, head_dim, generator=generator).bfloat16()
    order = iter(torch.randperm(num_blocks - 1, generator=generator).add(1).tolist())
    tables = np.zeros((len(spans), 7), dtype=np.int32)
    for row, (start, n) in enumerate(spans):
        tables[row, : -(-(start + n) // block_size)] = [next(order) for _ in range(-(-(start + n) // block_size))]
    owner = np.repeat(np.arange(len(spans)), [n for _, n in spans])
    positions = np.concatenate([np.arange(s, s + n) for s, n in spans])
    slots = torch.from_numpy(
        tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    )
    angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    firsts = np.cumsum([0] + [n for _, n in spans])
    written = pool.clone()
    step = AttentionStep(
        pool=written[None], rows=[Rows(int(firsts[i]), n, i) for i, (_, n) in enumerate(spans)],
        tables=tables, limits=positions + 1, positions=torch.from_numpy(positions), slots=slots, cos_sin=(cos, sin),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
    )  # fmt: skip
    out = step(0, qkv.clone())

    half = head_dim // 2
    c, s = cos[positions][:, None], sin[positions][:, None]
    rotated = qkv.float().clone()
    a, b = qkv.float()[:, : heads + kv_heads, :half], qkv.float()[:, : heads + kv_heads, half:]
    rotated[:, : heads + kv_heads] = torch.cat([a * c - b * s, b * c + a * s], -1).bfloat16().float()
    rows = pool.float().view(-1, 2 * kv_heads, head_dim).clone()
    rows[slots] = rotated[:, heads:]
    torch.testing.assert_close(written.float().view_as(rows), rows, atol=0, rtol=1e-2)
    for i, position in enumerate(positions):
        seen = np.arange(position + 1)
        kv = rows[
            torch.from_numpy(tables[owner[i], seen // block_size].astype(np.int64) * block_size + seen % block_size)
        ]
        keys, values = kv[:, :kv_heads], kv[:, kv_heads:]
        for h in range(heads):
            g = h // (heads // kv_heads)
            law = torch.softmax(keys[:, g] @ rotated[i, h] * head_dim**-0.5, 0)
            torch.testing.assert_close(
                out.view(num_rows, heads, head_dim)[i, h].float(), law @ values[:, g], atol=3e-2, rtol=2e-2
            )


@pytest.mark.skipif(native.load() is None, reason="no AVX512-BF16 or no C compiler")
def test_bfloat16_step_is_as_close_to_float32_with_native_kernels_as_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_target: Callable[..., Path]
) -> None:
    folder = write_target(tmp_path, "llama", head_dim=32)
    ids = list(range(2, 62))
    exact, _ = reference(folder, ids)
    errors = {}
    for name in ("native", "torch"):
        if name == "torch":
            monkeypatch.setattr(native, "load", lambda: None)
        runner = TargetRunner(
            VerifierConfig(str(folder), dtype="bfloat16", device="cpu", capture_layers=(0,), num_threads=1)
        )
        found = [run(runner, plan) for plan in two_request_plans(ids)]
        errors[name] = torch.cat([(got.float() - exact[p]).abs() for p, got, _ in found if len(p)]).mean().item()
    assert errors["native"] < 1.3 * errors["torch"] + 1e-3, errors


def test_rejected_drafts_leave_no_trace_in_later_steps(llama_target: Path) -> None:
    """Whatever was drafted and rejected at a position, the next step reads only what was committed."""
    ids = torch.randint(2, 64, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    wrong = ids[:20] + [63 - t for t in ids[20:]]
    logits, _ = reference(llama_target, ids)
    runner = TargetRunner(
        VerifierConfig(str(llama_target), dtype="float32", device="cpu", capture_layers=(0,), num_threads=1)
    )
    table = np.array([3, 1, 4], dtype=np.int32)
    run(runner, Plan(0, (extension("a", ids, 0, 20, table),)))
    for start in range(20, 32):
        run(
            runner,
            Plan(1, (extension("a", ids[: start + 1] + wrong[start + 1 :], start, start + 8, table, num_draft=7),)),
        )
        positions, got, _ = run(runner, Plan(2, (extension("a", ids, start, start + 1, table),)))
        torch.testing.assert_close(got, logits[positions], atol=2e-4, rtol=1e-4)


def test_features_are_of_committed_rows_only(llama_target: Path) -> None:
    runner = TargetRunner(
        VerifierConfig(str(llama_target), dtype="float32", device="cpu", capture_layers=(0,), num_threads=1)
    )
    table = np.array([3, 1, 4], dtype=np.int32)
    ids = list(range(2, 42))
    chunk = extension("b", ids, 0, 9, table + 10, samples=False)
    plan = Plan(0, (chunk, extension("a", ids, 0, 12, table, num_draft=4)))
    verdicts, features = runner.verify(plan)
    assert features is not None
    accepted = verdicts[1].num_accepted
    assert verdicts[0].token_ids == () and len(verdicts[1].token_ids) == accepted + 1
    assert features.positions.tolist() == [*range(9), *range(8 + accepted)]
    assert kept_rows(plan, verdicts) == [*range(9), *range(9, 17 + accepted)]


def test_contexts_of_very_different_length_are_not_padded_together() -> None:
    table = np.arange(1, 200, dtype=np.int32)
    spans = [Span(0, 1, 3000, table), Span(1, 1, 10, table), Span(2, 8, 20, table), Span(10, 300, 0, table)]
    assert [sorted(s.first_row for s in bucket) for bucket in split_spans(spans, 16)] == [[10], [0], [1, 2]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"quantization_config": {"quant_method": "awq"}}, "unquantised"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(
    llama_target: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((llama_target / "config.json").read_text()) | change
    if change.get("num_attention_heads", 0) is None:
        del config["num_attention_heads"]
    with pytest.raises(SettingsError, match=words):
        parse_architecture(config, "config.json")


def test_a_truncated_or_incomplete_checkpoint_is_one_clear_error(llama_target: Path, tmp_path: Path) -> None:
    arch = read_architecture(llama_target)
    (tmp_path / "config.json").write_text((llama_target / "config.json").read_text())
    with pytest.raises(SettingsError, match=r"no model\.safetensors"):
        load_target(tmp_path, arch, torch.float32, torch.device("cpu"))
    whole = (llama_target / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SettingsError, match="truncated"):
        load_target(tmp_path, arch, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "/no/such.gguf"}, "GGUF file"),
        ({"model": "no such folder!"}, "valid hub id"),
        ({"dtype": "float8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"max_model_len": 100000}, "max_model_len"),
        ({"capture_layers": (2,)}, "target layer 2"),
        ({"num_blocks": 1}, "num_blocks"),
    ],
)
def test_settings_that_cannot_work_name_the_key(llama_target: Path, config: dict[str, object], words: str) -> None:
    merged = {"model": str(llama_target), "device": "cpu"} | config
    with pytest.raises(SettingsError, match=words):
        TargetRunner(VerifierConfig(**merged))  # type: ignore[arg-type]


def test_a_gguf_file_is_converted_once_and_read_from_the_cache_after(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source = tmp_path / "tiny.gguf"
    arch = write_tiny_gguf(gguf, source)
    folder = resolve_model(str(source), str(tmp_path / "cache"))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert read_architecture(folder).num_layers == arch["layers"]
    assert resolve_model(str(source), str(tmp_path / "cache")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name], "nothing half-written is left"
    runner = TargetRunner(VerifierConfig(str(source), dtype="float32", device="cpu", cache_dir=str(tmp_path / "cache")))
    verdicts, _ = runner.verify(Plan(0, (extension("a", [1, 2, 3], 0, 3, np.array([1], dtype=np.int32)),)))
    assert len(verdicts[0].token_ids) == 1


def test_a_damaged_conversion_is_made_anew_and_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, source)
    folder = resolve_model(str(source), str(tmp_path / "cache"))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (whole[:-9], b"", None):
        if damage is None:
            weights.unlink()
        else:
            weights.write_bytes(damage)
        assert resolve_model(str(source), str(tmp_path / "cache")) == folder
        assert weights.read_bytes() == whole
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SettingsError, match="cache_dir: the converted weights of"):
        resolve_model(str(source), str(tmp_path / "file"))


def test_of_several_starts_at_once_one_converts_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, source)
    convert, begun = target_files._convert_gguf, []

    def slowly(path: Path, folder: Path) -> None:
        begun.append(folder)
        time.sleep(0.3)
        convert(path, folder)

    monkeypatch.setattr(target_files, "_convert_gguf", slowly)
    with ThreadPoolExecutor(4) as starts:
        folders = list(starts.map(lambda _: resolve_model(str(source), str(tmp_path / "cache")), range(4)))
    assert len(begun) == 1 and len(set(folders)) == 1
    assert read_architecture(folders[0]).num_layers > 0
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]


def write_tiny_gguf(gguf: object, path: Path) -> dict[str, int]:
    """A one-layer Llama with a byte-level BPE tokenizer of 256 bytes, a merge and two marks, in Q8_0."""
    writer = gguf.GGUFWriter(str(path), "llama")  # type: ignore[attr-defined]
    d, f, heads, vocab = 64, 128, 2, 259
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(f)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    from tokenizers.pre_tokenizers import ByteLevel

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "ab", "<s>", "</s>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (vocab, d), "output_norm.weight": (d,), "blk.0.attn_norm.weight": (d,),
        "blk.0.ffn_norm.weight": (d,), "blk.0.attn_q.weight": (d, d), "blk.0.attn_k.weight": (d, d),
        "blk.0.attn_v.weight": (d, d), "blk.0.attn_output.weight": (d, d), "blk.0.ffn_gate.weight": (f, d),
        "blk.0.ffn_up.weight": (f, d), "blk.0.ffn_down.weight": (d, f),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * 0.1
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0  # type: ignore[attr-defined]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)  # type: ignore[attr-defined]
        else:
            writer.add_tensor(name, values + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"layers": 1}


def test_loading_the_native_kernels_leaves_the_process_arithmetic_alone() -> None:
    native.load()
    assert float(np.float64(5e-324) + np.float64(0)) > 0 and float(torch.tensor([1e-310], dtype=torch.float64)[0]) > 0
    assert float(np.float64(2.0) ** -1074 * np.float64(1.0)) > 0
