"""States that are recomputed beside training: equal to those kept while answering, bounded when cached, exact when trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from drafter.train.answers import Answer, AnswerFolder, JsonLines, answers_path
from drafter.train.blocks import build_batch, valid_anchors
from drafter.train.corpus import AnswerWriter, Job, Written
from drafter.train.fresh import FreshStates
from drafter.train.loop import LoopConfig
from drafter.train.recipe import CacheConfig, DrafterShape, RunConfig, start_training
from drafter.train.states import States
from drafter.train.states_cache import StatesCache
from drafter.train.target import load_decoder
from scheduler.errors import SettingsError
from verifier.model import Decoder

CAPTURE = (-1, 1)
SHAPE = DrafterShape(target_layer_ids=CAPTURE, mask_token_id=0, block_size=4, markov_rank=8, draft_vocab_size=60)


@pytest.fixture(scope="module")
def decoder(llama_target: Path) -> Decoder:
    return load_decoder(llama_target, torch.float32, torch.device("cpu"), max_len=64)


@pytest.fixture(scope="module")
def written(decoder: Decoder) -> list[Written]:
    random = Random(3)
    writer = AnswerWriter(decoder, capture=CAPTURE, stop_ids=[1], rows=6, max_len=30)
    prompts = [tuple(random.randrange(2, 64) for _ in range(random.randrange(2, 9))) for _ in range(20)]
    jobs = [Job(f"{i:08x}{i:08x}", "chat", prompt, float(i % 2), 16) for i, prompt in enumerate(prompts)]
    return list(writer.answers(iter(jobs)))


@pytest.fixture
def folder(written: list[Written], tmp_path: Path) -> Path:
    lines = JsonLines(answers_path(tmp_path / "data", 0))
    for w in written:
        span = (len(w.job.prompt_ids), len(w.ids))
        lines.append(Answer(w.job.prompt_id, "chat", w.ids, [span], w.job.temperature, 16, w.finish_reason).line())
    return tmp_path / "data"


def test_recomputed_states_equal_those_kept_while_answering(
    folder: Path, decoder: Decoder, written: list[Written]
) -> None:
    fresh = FreshStates(AnswerFolder(folder), decoder, CAPTURE)
    fresh.upcoming([name for name, _ in fresh.named()])
    for w in written:
        kept, found = w.states, fresh.read_named(w.job.prompt_id)
        assert kept is not None and found.ids.tolist() == kept.ids.tolist() and found.spans == kept.spans
        rows = valid_anchors(kept)
        torch.testing.assert_close(found.features[:-1], kept.features[:-1], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.last[rows], kept.last[rows], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.lse[rows], kept.lse[rows], atol=1e-3, rtol=1e-3)


def test_the_loss_mask_of_a_conversation_leaves_out_what_the_user_said(decoder: Decoder, tmp_path: Path) -> None:
    ids = [int(x) for x in torch.randint(2, 64, (20,), generator=torch.Generator().manual_seed(0))]
    JsonLines(answers_path(tmp_path, 0)).append(Answer("00", "chat", ids, [(3, 8), (12, 19)], 1.0, 16, "stop").line())
    states = FreshStates(AnswerFolder(tmp_path), decoder, CAPTURE).read_named("00")
    anchors = valid_anchors(states)
    assert anchors.tolist() == [3, 4, 5, 6, 12, 13, 14, 15, 16, 17]
    batch = build_batch([(states, anchors, 3)], decay=4.0)
    for row, anchor in enumerate(anchors.tolist()):
        end = 8 if anchor < 8 else 19
        for k in range(1, 4):
            slot = row * 3 + k - 1
            assert bool(batch.weights[slot] > 0) == (anchor + k < end)
            if anchor + k < end:
                assert batch.label_ids[slot] == ids[anchor + k]
                torch.testing.assert_close(batch.last[batch.law_rows[slot]], states.last[anchor + k - 1])
    whole = decoder.logits(decoder.forward(torch.tensor(ids), torch.arange(20), Causal(decoder), ())[0])
    laws = batch.last[batch.law_rows] @ decoder.embed_tokens.t() if decoder.arch.tie_word_embeddings else None
    assert laws is None or torch.allclose(laws[0], whole[3], atol=1e-3)


class Causal:
    """The slow twin's attention: one sequence, explicit mask."""

    rotates = False

    def __init__(self, decoder: Decoder) -> None:
        self.heads = (decoder.arch.num_heads, decoder.arch.num_kv_heads)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        heads, kv = self.heads
        q, k, v = qkv.split((heads, kv, kv), dim=1)
        k, v = (x.repeat_interleave(heads // kv, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        mask = torch.ones(len(q), len(q)).triu(1).bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, -torch.inf).softmax(-1), v).flatten(1)


def cache(folder: Path, limit: int, form: str = "bf16", policy: str = "lru", target: str = "a") -> StatesCache:
    return StatesCache(folder, {"target": target}, limit_bytes=limit, form=form, policy=policy)


def states_of(seed: int) -> States:
    random = torch.Generator().manual_seed(seed)
    # as in a residual stream: a few columns a thousand times the rest
    features = torch.randn(40, 64, generator=random) * torch.where(torch.arange(64) % 20 == 7, 1000.0, 1.0)
    ids, last = torch.arange(40, dtype=torch.int32), torch.randn(40, 32, generator=random)
    return States(ids, features, last, torch.rand(40, generator=random), 5, {"prompt_id": f"{seed:04x}"})


@pytest.mark.parametrize(("form", "tolerance", "bytes_per_token"), [("bf16", 2**-8, 2 * 96 + 8), ("int8", 0.02, 136)])
def test_a_cache_gives_back_what_it_was_given(
    form: str, tolerance: float, bytes_per_token: int, tmp_path: Path
) -> None:
    kept, given = cache(tmp_path, 10**6, form), states_of(0)
    kept.put("x", given)
    found = cache(tmp_path, 10**6, form).get("x")
    assert found is not None and found.prompt_len == 5 and found.meta == given.meta
    assert torch.equal(found.ids, given.ids) and torch.equal(found.lse, given.lse)
    for mine, theirs in ((found.features, given.features), (found.last, given.last)):
        error = (mine.float() - theirs).square().mean(0).sqrt() / theirs.square().mean(0).sqrt()
        assert float(error.max()) < tolerance
    column_scales = 4 * 64 if form == "int8" else 0
    assert kept.num_bytes == pytest.approx(40 * bytes_per_token + column_scales, abs=900)
    assert kept.get("y") is None and (kept.hits, kept.misses) == (0, 1)


@pytest.mark.parametrize(("policy", "kept_names"), [("lru", [0, 5, 6]), ("one-pass", [0, 1, 2])])
def test_a_full_cache_stays_below_its_limit(policy: str, kept_names: list[int], tmp_path: Path) -> None:
    one = cache(tmp_path / "one", 10**6)
    one.put("0", states_of(0))
    bounded = cache(tmp_path / "bounded", 3 * one.num_bytes + 1500, policy=policy)
    for seed in range(7):
        bounded.put(str(seed), states_of(seed))
        assert bounded.get("0") is not None
        assert bounded.num_bytes <= bounded.limit_bytes
    files = list((tmp_path / "bounded").glob("*.safetensors"))
    assert len(files) == len(bounded) == 3
    assert [i for i in range(7) if bounded.get(str(i)) is not None] == kept_names


def test_a_cache_of_another_target_is_refused(tmp_path: Path) -> None:
    cache(tmp_path, 100, target="a")
    with pytest.raises(SettingsError, match="target was 'a' when this folder was begun, now 'b'"):
        cache(tmp_path, 100, target="b")
    with pytest.raises(SettingsError, match="cache policy: 'mru' is not one of one-pass, lru"):
        cache(tmp_path / "new", 100, policy="mru")


def test_a_damaged_cache_file_is_computed_anew(tmp_path: Path) -> None:
    kept = cache(tmp_path, 10**6)
    kept.put("x", states_of(0))
    next(tmp_path.glob("*.safetensors")).write_bytes(b"half")
    assert kept.get("x") is None and len(kept) == 0


@pytest.fixture
def config(folder: Path, llama_target: Path, tmp_path: Path) -> RunConfig:
    loop = LoopConfig(total_steps=4, positions_per_step=200, anchors_per_sequence=8, held_out_every=5, evaluate_every=4)
    return RunConfig(str(llama_target), folder, tmp_path / "run", SHAPE, loop, dtype="float32", max_len=64)


def losses(config: RunConfig) -> Iterator[float]:
    training = start_training(config)
    while training.step < 4:
        yield training.update(training.next_batches())["loss"]


def test_training_on_recomputed_states_needs_no_kept_ones_and_a_cache_changes_nothing(
    config: RunConfig, tmp_path: Path
) -> None:
    plain = list(losses(config))
    cached = replace(config, run=tmp_path / "run2", cache=CacheConfig(tmp_path / "cache", 10**7))
    # the cache rounds to bfloat16
    assert list(losses(cached)) == pytest.approx(plain, rel=0.01)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) >= 10


def test_answers_of_another_target_are_refused(config: RunConfig, folder: Path) -> None:
    row = Answer("ffff", "chat", [3, 4, 64, 5], [(1, 4)], 0.0, 4, "stop")
    JsonLines(answers_path(folder, 0)).append(row.line())
    with pytest.raises(SettingsError, match="answer ffff has token 64, this target's vocabulary 64"):
        start_training(config)


def test_half_a_line_is_left_out_and_dropped_by_the_next_writer(folder: Path) -> None:
    whole = len(AnswerFolder(folder))
    path = answers_path(folder, 0)
    with path.open("a") as file:
        file.write('{"prompt_id": "half')
    assert len(AnswerFolder(folder)) == whole
    lines = JsonLines(path)
    lines.append(Answer("aaaa", "chat", [3, 4, 5], [(1, 3)], 0.0, 4, "stop").line())
    assert len(AnswerFolder(folder)) == whole + 1
    path.write_text(path.read_text().replace('"spans": [[1, 3]]', '"spans": [[1, 9]]'))
    with pytest.raises(SettingsError, match="answer aaaa has spans that do not lie in its ids"):
        AnswerFolder(folder)
