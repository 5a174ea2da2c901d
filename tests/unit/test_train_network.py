"""The trainable drafter: its attention against a slow twin and against serving, its gradients, its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.checkpoint import load_checkpoint, read_drafter
from drafter.train.bigrams import bigram_factors
from drafter.train.blocks import build_batch, draw_anchors, valid_anchors
from drafter.train.corpus import AnswerWriter, Job
from drafter.train.loop import LoopConfig, batch_loss
from drafter.train.loss import LossConfig
from drafter.train.network import Blocks, DraftNetwork
from drafter.train.optimiser import Optimiser, OptimiserConfig, orthogonalised, schedule
from drafter.train.recipe import DrafterShape, RunConfig, build_network, drafter_config, export
from drafter.train.start import choose_vocabulary
from drafter.train.states import States, StatesFolder, shard_path, write_shard
from drafter.train.target import load_decoder
from scheduler.errors import SettingsError

LAYERS = (0, 1)
SHAPE = DrafterShape(target_layer_ids=LAYERS, mask_token_id=0, block_size=5, markov_rank=8, draft_vocab_size=40)


@pytest.fixture(scope="module")
def states_folder(llama_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    decoder = load_decoder(llama_target, torch.float32, torch.device("cpu"), max_len=40)
    writer = AnswerWriter(decoder, capture=LAYERS, stop_ids=[1], rows=8, max_len=32)
    prompts = [
        tuple(int(x) for x in torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(i))) for i in range(24)
    ]
    jobs = [Job(f"{i:08x}{i:08x}", "chat", prompt, float(i % 2), 20) for i, prompt in enumerate(prompts)]
    write_shard(shard_path(folder, 0, 0), list(writer.write(jobs)))
    return folder


@pytest.fixture(scope="module")
def config(llama_target: Path, states_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return RunConfig(
        str(llama_target), states_folder, tmp_path_factory.mktemp("run"), SHAPE, dtype="float32", max_len=64
    )


@pytest.fixture
def network(config: RunConfig, states_folder: Path) -> DraftNetwork:
    found = build_network(config, StatesFolder(states_folder))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return found


def sequences(folder: Path) -> list[States]:
    known = StatesFolder(folder)
    return [known.read_named(name) for name, _ in known.named()]


def slow_block(network: DraftNetwork, features: Tensor, anchor: int, anchor_id: int, length: int) -> Tensor:
    """One anchor at a time, no cache, no fused products: the formulas of the reference, 2.4."""
    arch = network.arch.decoder
    hd, heads, kv = arch.head_dim, arch.num_heads, arch.num_kv_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + arch.rms_norm_eps) * weight

    def rope(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.float(), arch.rope_theta ** (-torch.arange(0, hd, 2).float() / hd))
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        half = torch.cat((-x[..., hd // 2 :], x[..., : hd // 2]), -1)
        return x * cos + half * sin

    weights = dict(network.named_parameters())
    context = norm(
        (features[:anchor] * network.feature_scale) @ weights["fc.weight"].t(), weights["hidden_norm.weight"]
    )
    ids = torch.tensor([anchor_id] + [network.arch.mask_token_id] * (length - 1))
    hidden = network.embed_tokens[ids]
    at, before = torch.arange(anchor, anchor + length), torch.arange(anchor)
    for i in range(arch.num_layers):
        w = {n.removeprefix(f"layers.{i}."): p for n, p in weights.items() if n.startswith(f"layers.{i}.")}
        x = norm(hidden, w["input_layernorm.weight"])
        q = rope((x @ w["self_attn.q_proj.weight"].t()).view(length, heads, hd), at)
        both = torch.cat((context, x))
        k = rope((both @ w["self_attn.k_proj.weight"].t()).view(-1, kv, hd), torch.cat((before, at)))
        v = (both @ w["self_attn.v_proj.weight"].t()).view(-1, kv, hd)
        k, v = (y.repeat_interleave(heads // kv, dim=1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(hd)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)
        hidden = hidden + out @ w["self_attn.o_proj.weight"].t()
        x = norm(hidden, w["post_attention_layernorm.weight"])
        gated = F.silu(x @ w["mlp.gate_proj.weight"].t()) * (x @ w["mlp.up_proj.weight"].t())
        hidden = hidden + gated @ w["mlp.down_proj.weight"].t()
    return norm(hidden, weights["norm.weight"])


def blocks_of(states: States, anchors: Tensor, length: int) -> Blocks:
    return Blocks(states.features[: int(anchors.max())], anchors, states.ids.long(), length)


@torch.no_grad()
def test_blocks_packed_over_sequences_equal_one_slow_forward_per_anchor(
    network: DraftNetwork, states_folder: Path
) -> None:
    found = [s for s in sequences(states_folder) if s.answer_len > 8][:3]
    batch = [blocks_of(s, valid_anchors(s)[::2], length) for s, length in zip(found, (5, 1, 3), strict=True)]
    hidden = network(batch).split([len(b.anchors) * b.length for b in batch])
    for states, blocks, rows in zip(found, batch, hidden, strict=True):
        for anchor, row in zip(blocks.anchors.tolist(), rows.view(len(blocks.anchors), blocks.length, -1), strict=True):
            expected = slow_block(network, states.features, anchor, int(states.ids[anchor]), blocks.length)
            torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_a_block_does_not_see_the_features_of_its_anchor_or_later(network: DraftNetwork, states_folder: Path) -> None:
    states = next(s for s in sequences(states_folder) if s.answer_len > 10)
    anchors = valid_anchors(states)[:6]
    before = network([blocks_of(states, anchors, 4)]).view(6, 4, -1)
    states.features[int(anchors[2]) :] += 3
    after = network([blocks_of(states, anchors, 4)]).view(6, 4, -1)
    torch.testing.assert_close(after[:3], before[:3])
    assert bool((after[3:] - before[3:]).abs().amax((1, 2)).min() > 1e-3)


def test_gradients_reach_every_weight_and_no_frozen_one(network: DraftNetwork, states_folder: Path) -> None:
    parts = [(s, valid_anchors(s), 5) for s in sequences(states_folder) if s.answer_len > 6]
    loss, _ = batch_loss(network, build_batch(parts, 4.0), LossConfig(kl=0.1))
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    assert not network.embed_tokens.requires_grad and not network.lm_head.requires_grad


def test_the_exported_file_has_the_lighter_form(network: DraftNetwork, config: RunConfig, tmp_path: Path) -> None:
    export(config, network, tmp_path)
    arch = read_drafter(tmp_path)
    assert arch.variable_block and arch.target_layer_ids == LAYERS and arch.kind == "dspark-vanilla"
    tensors = load_checkpoint(tmp_path, Path(config.target), torch.float32, torch.device("cpu")).tensors
    assert tensors["markov_head.markov_w1.weight"].shape == (41, 8)
    assert tensors["markov_head.markov_w2.weight"].shape == (40, 8)
    assert tensors["fc.weight"].shape == (64, 128)
    stored = network.checkpoint_tensors()
    assert "embed_tokens.weight" not in stored and "lm_head.weight" not in stored
    assert stored["draft_vocab_ids"].dtype is torch.int32


def test_slots_predict_the_tokens_after_their_anchor(states_folder: Path) -> None:
    states = next(s for s in sequences(states_folder) if s.answer_len > 6)
    n, ids = len(states.ids), states.ids.tolist()
    anchors = torch.tensor([states.prompt_len, n - 3, n - 2])
    batch = build_batch([(states, anchors, 3)], decay=4.0)
    for row, anchor in enumerate(anchors.tolist()):
        for k in range(1, 4):
            slot = row * 3 + k - 1
            if anchor + k > n - 1:
                assert batch.weights[slot] == 0
                continue
            assert batch.weights[slot] == pytest.approx(math.exp(-(k - 1) / 4))
            assert (batch.previous_ids[slot], batch.label_ids[slot]) == (ids[anchor + k - 1], ids[anchor + k])
            law = batch.law_rows[slot]
            torch.testing.assert_close(batch.last[law], states.last[anchor + k - 1])
            assert batch.lse[law] == states.lse[anchor + k - 1]
    assert batch.num_positions == 3 + 2 + 1


def test_anchors_are_answer_tokens_with_a_successor(states_folder: Path) -> None:
    for states in sequences(states_folder):
        drawn = draw_anchors(states.spans, 4, torch.Generator().manual_seed(0))
        assert len(drawn) == min(4, states.answer_len - 1)
        assert bool((drawn >= states.prompt_len).all() and (drawn < len(states.ids) - 1).all())
        assert bool((drawn[1:] > drawn[:-1]).all())


def test_the_draft_vocabulary_holds_the_stop_ids_and_what_the_target_writes(
    config: RunConfig, states_folder: Path
) -> None:
    found = sequences(states_folder)
    head = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.01
    ids = choose_vocabulary(found, head, 30, [1, 63])
    assert len(ids) == 30 and bool((ids[1:] > ids[:-1]).all()) and {1, 63} <= set(ids.tolist())
    counts = torch.bincount(torch.cat([s.ids[s.prompt_len :] for s in found]).long(), minlength=64)
    assert set(counts.topk(10).indices.tolist()) <= set(ids.tolist())
    assert choose_vocabulary(found, head, 0, [1]).tolist() == list(range(64))


def test_bigram_factors_give_back_the_law_of_a_markov_target() -> None:
    generator = torch.Generator().manual_seed(0)
    size, rank = 12, 12
    logits = 2 * torch.randn(size + 1, size, generator=generator)
    head = torch.eye(size)
    parts = []
    for seed in range(30):
        ids = torch.randint(0, size, (200,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        last = logits[ids.long()]
        parts.append(States(ids, last[:, :0], last, last.logsumexp(-1), 1, {}))
    w1, w2 = bigram_factors(parts, head, torch.arange(size), rank, generator)
    assert w1.shape == (size + 1, rank) and w2.shape == (size, rank)
    torch.testing.assert_close((w1 @ w2.t()).softmax(-1)[:size], logits[:size].softmax(-1), atol=0.03, rtol=0.1)


def test_the_schedule_warms_up_holds_and_falls_to_zero() -> None:
    config = OptimiserConfig(warmup_share=0.1, decay_share=0.5)
    factors = [schedule(step, 100, config) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1 and factors[49] == 1
    assert factors[75] == pytest.approx(0.5) and factors[100] == pytest.approx(0, abs=1e-9)
    assert all(a >= b for a, b in pairwise(factors[10:]))
    assert schedule(52, 100, OptimiserConfig(warmup_share=0.04)) == pytest.approx(0.5)


def test_adamw_equals_the_one_of_torch() -> None:
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    optimiser = Optimiser([("layers.0.x", mine)], OptimiserConfig(lr=1e-2, max_grad_norm=1e9, weight_decay=0.1))
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for step in range(5):
        for parameter in (mine, theirs):
            parameter.grad = (parameter.detach() - step).sin()
        optimiser.step(1.0)
        reference.step()
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 60)])
def test_muon_updates_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    update = orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update)
    assert update.shape == shape and float(values.min()) > 0.4 and float(values.max()) < 1.4


def test_features_of_other_layers_are_refused(config: RunConfig, states_folder: Path, tmp_path: Path) -> None:
    other = RunConfig(config.target, states_folder, tmp_path, DrafterShape((1,), 0), dtype="float32")
    with pytest.raises(SettingsError, match="features of width 128; target_layer_ids need 64"):
        build_network(other, StatesFolder(states_folder))


def test_a_target_without_a_drafter_family_is_refused(write_target: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="model_type 'gpt2' has no drafter yet"):
        drafter_config({"model_type": "gpt2", "num_hidden_layers": 2}, SHAPE, LoopConfig())
    with pytest.raises(SettingsError, match="strictly increasing"):
        drafter_config({"model_type": "llama", "num_hidden_layers": 2}, SHAPE, LoopConfig())
