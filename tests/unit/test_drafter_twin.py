"""Batched, paged, fused drafting against a slow dense twin of the reference forward, over many rounds of random requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.runner import DraftRunner
from scheduler.wire import Draft, DraftAsk, SamplingParams
from tests.unit.drafter_twins import GAMMA, DenseTwin, Flavour, twin_of, write_drafter
from verifier.features import CommittedFeatures
from verifier.kv import slots_of

BLOCK_SIZE = 4
NUM_BLOCKS = 800
# Of probabilities, after five chained float32 steps behind 630 rows.
TOLERANCE = 3e-4


@pytest.fixture(autouse=True)
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the small vocabularies here as one too large to be scored whole, where candidates are chosen beforehand."""
    monkeypatch.setattr("drafter.propose.SCORED_WHOLE", 0)


FLAVOURS = {
    "qwen3 vanilla, whole vocabulary": Flavour("qwen3", "vanilla"),
    "qwen3 rnn, candidates": Flavour("qwen3", "rnn", candidates=6),
    "qwen3 gated, lighter, reduced vocabulary": Flavour(
        "qwen3", "gated", draft_vocab=40, short_w1=True, lighter=True, candidates=8
    ),
    "llama vanilla, reduced vocabulary, variable block": Flavour(
        "llama", "vanilla", draft_vocab=40, short_w1=True, lighter=True, variable=True, candidates=8
    ),
    "llama rnn with biases, confidence without Markov": Flavour(
        "llama", "rnn", with_markov=False, bias=True, variable=True
    ),
    "llama gated, reduced vocabulary, long W1": Flavour("llama", "gated", draft_vocab=48, candidates=48),
    "qwen2 vanilla without confidence": Flavour("qwen2", "vanilla", confidence=False, bias=True, candidates=12),
    "qwen3 eagle3, whole vocabulary": Flavour("qwen3", "none", design="eagle3"),
    "llama eagle3, lighter, vocabulary maps, candidates": Flavour(
        "llama", "none", design="eagle3", draft_vocab=40, maps=True, lighter=True, candidates=8
    ),
    "qwen2 eagle3 with biases": Flavour("qwen2", "none", design="eagle3", bias=True, draft_vocab=48, candidates=9),
    "llama mtp, reduced vocabulary": Flavour("llama", "none", design="mtp", draft_vocab=40, lighter=True, candidates=8),
    "qwen3 mtp": Flavour("qwen3", "none", design="mtp"),
    "llama without heads (DFlash)": Flavour("llama", "none", confidence=False, candidates=10),
}


CHAIN_OR_BLOCK = pytest.mark.parametrize(
    "name",
    [
        "llama vanilla, reduced vocabulary, variable block",
        "llama eagle3, lighter, vocabulary maps, candidates",
        "llama mtp, reduced vocabulary",
    ],
)


@dataclass
class Life:
    """One random request: its block table, its tokens, and the features of its context so far."""

    name: str
    params: SamplingParams
    block_ids: np.ndarray
    features: Tensor
    token_ids: list[int]
    num_absorbed: int = 0
    context_from: int = 0

    def take(self, stop: int) -> CommittedFeatures:
        first, self.num_absorbed = self.num_absorbed, stop
        slots = slots_of(self.block_ids, 0, stop, BLOCK_SIZE)
        return CommittedFeatures(
            features=self.features[first:stop],
            slots=torch.from_numpy(slots[first:]),
            positions=torch.arange(first, stop),
            token_ids=torch.tensor(self.token_ids[first:stop], dtype=torch.int64),
            previous_slots=torch.from_numpy(np.concatenate(([0], slots))[first:stop]),
        )

    def ask(self) -> DraftAsk:
        used = self.block_ids[: -(-self.num_absorbed // BLOCK_SIZE)]
        anchor_id = self.token_ids[self.num_absorbed]
        return DraftAsk(
            self.name, anchor_id, self.num_absorbed, used, self.params, output_index=1, context_from=self.context_from
        )


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.3, seed=7),
    SamplingParams(temperature=0.8, top_k=4),
]


def lives(rng: np.random.Generator, twin: DenseTwin, max_len: int) -> list[Life]:
    width = len(twin.arch.target_layer_ids) * twin.arch.decoder.hidden_size
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)
    per_request = NUM_BLOCKS // len(PARAMS) - 1
    made = []
    for i, params in enumerate(PARAMS):
        table = blocks[i * per_request : (i + 1) * per_request]
        features = torch.from_numpy(rng.normal(size=(max_len, width)).astype(np.float32))
        made.append(Life(str(i), params, table, features, rng.integers(64, size=max_len).tolist()))
    return made


def assert_like_twin(twin: DenseTwin, life: Life, draft: Draft, width: int, candidates: int) -> None:
    drawn = draft.token_ids.tolist()
    if twin.arch.design != "dspark" and life.num_absorbed == life.context_from:
        assert drawn == []
        return
    assert len(drawn) == width
    # positions are relative: a request that begins where its context does is drafted alike
    known = life.token_ids[life.context_from : life.num_absorbed + 1]
    num_slots = width if twin.arch.variable_block else GAMMA
    features = life.features[life.context_from : life.num_absorbed]
    base, corrected, confidence = twin.logits(features, known, drawn, num_slots)
    law = twin.law(base, corrected, life.params, candidates)
    if life.params.greedy:
        assert drawn == law.argmax(-1).tolist()
    assert (law[torch.arange(width), drawn] > 0).all()
    if confidence is None:
        assert draft.confidence is None
    else:
        np.testing.assert_allclose(draft.confidence, confidence.sigmoid().numpy(), atol=TOLERANCE)
    if life.params.greedy or life.params.seed is not None:
        assert draft.q_ids is None
        return
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    assert draft.q_probs.dtype == np.float32
    ours = torch.zeros_like(law).scatter_(1, torch.from_numpy(draft.q_ids).long(), torch.from_numpy(draft.q_probs))
    torch.testing.assert_close(ours, law, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(draft.q_probs.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
def test_many_rounds_of_batched_paged_drafting_equal_the_dense_twin(
    flavour: Flavour, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    target = write_target(tmp_path / "target", flavour.family)
    drafter = write_drafter(tmp_path / "drafter", target, flavour)
    runner = DraftRunner(
        DrafterConfig(
            str(drafter),
            str(target),
            dtype="float32",
            device="cpu",
            candidates=flavour.candidates,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_threads=1,
            seed=1,
        )
    )
    twin = twin_of(drafter, target)
    rng = np.random.default_rng(5)
    requests = lives(rng, twin, 640)
    for round_index in range(10):
        # one request soon has a context so long that it must not share a padded call with the others
        chunks = [60 if life is requests[1] else int(rng.integers(1, GAMMA + 2)) for life in requests]
        active = [life for life in requests if round_index == 0 or rng.random() < 0.7]
        messages = [
            life.take(life.num_absorbed + n) for life, n in zip(requests, chunks, strict=True) if life in active
        ]
        width = int(rng.integers(1, GAMMA + 1))
        drafts = runner.propose([life.ask() for life in active], width, messages)
        assert [d.request_id for d in drafts] == [life.name for life in active]
        for life, draft in zip(active, drafts, strict=True):
            assert_like_twin(twin, life, draft, width, flavour.candidates)


def runner_and_twin(
    flavour: Flavour, tmp_path: Path, write_target: Callable[..., Path], num_blocks: int = 40
) -> tuple[DraftRunner, DenseTwin]:
    """On a Llama target, whatever the drafter's family."""
    target = write_target(tmp_path / "target", "llama")
    drafter = write_drafter(tmp_path / "drafter", target, flavour)
    config = DrafterConfig(
        str(drafter), str(target), "float32", "cpu", flavour.candidates, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    return DraftRunner(replace(config, num_threads=1, seed=1)), twin_of(drafter, target)


@CHAIN_OR_BLOCK
def test_context_beyond_one_padded_call_is_split_and_still_right(
    name: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    flavour = FLAVOURS[name]
    runner, twin = runner_and_twin(flavour, tmp_path, write_target, num_blocks=NUM_BLOCKS)
    requests = lives(np.random.default_rng(1), twin, 640)
    lengths = [3, 630, 0, 610, 17]
    messages = [life.take(n) for life, n in zip(requests, lengths, strict=True)]
    for life, draft in zip(requests, runner.propose([r.ask() for r in requests], GAMMA, messages), strict=True):
        assert_like_twin(twin, life, draft, GAMMA, flavour.candidates)


@CHAIN_OR_BLOCK
def test_rows_before_the_context_are_not_looked_at(
    name: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    """They were never absorbed: their slots, and the states there, hold what overflowed in someone else's rows."""
    flavour = FLAVOURS[name]
    runner, twin = runner_and_twin(flavour, tmp_path, write_target, num_blocks=NUM_BLOCKS)
    requests = lives(np.random.default_rng(1), twin, 640)
    before = lives(np.random.default_rng(2), twin, 640)
    captured_from = [0, 33, 8, 600, 5]
    contexts, lengths = [0, 36, 8, 600, 8], [9, 70, 8, 630, 11]
    num_rows = NUM_BLOCKS // len(PARAMS) * BLOCK_SIZE - BLOCK_SIZE
    for life, other, first, context_from in zip(requests, before, captured_from, contexts, strict=True):
        other.block_ids, other.features[:] = life.block_ids, 1e9
        life.num_absorbed, life.context_from = first, context_from
    runner.propose([], GAMMA, [other.take(num_rows) for other in before])
    messages = [life.take(n) for life, n in zip(requests, lengths, strict=True)]
    for life, draft in zip(requests, runner.propose([r.ask() for r in requests], GAMMA, messages), strict=True):
        assert_like_twin(twin, life, draft, GAMMA, flavour.candidates)


@CHAIN_OR_BLOCK
def test_reused_slots_hold_the_rows_of_the_later_message(
    name: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    flavour = FLAVOURS[name]
    runner, twin = runner_and_twin(flavour, tmp_path, write_target)
    first, second = lives(np.random.default_rng(1), twin, 40)[:2]
    first.block_ids = second.block_ids = np.arange(1, 11, dtype=np.int32)
    messages = [first.take(9), second.take(9)]
    (draft,) = runner.propose([second.ask()], GAMMA, messages)
    assert_like_twin(twin, second, draft, GAMMA, flavour.candidates)


@CHAIN_OR_BLOCK
def test_a_prefix_shared_by_two_requests_serves_both_whatever_follows_it(
    name: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    """The first block is one request's; the other finds it in the prefix cache and goes on with tokens of its own."""
    runner, twin = runner_and_twin(FLAVOURS[name], tmp_path, write_target)
    first, second = lives(np.random.default_rng(1), twin, 40)[:2]
    first.block_ids, second.block_ids = np.array([1, 2, 3], dtype=np.int32), np.array([1, 5, 4], dtype=np.int32)
    second.features[:BLOCK_SIZE] = first.features[:BLOCK_SIZE]
    second.token_ids[:BLOCK_SIZE] = first.token_ids[:BLOCK_SIZE]
    assert second.token_ids[BLOCK_SIZE] != first.token_ids[BLOCK_SIZE]
    second.num_absorbed = BLOCK_SIZE
    for takes in ([(first, 6)], [(second, 7), (first, 9)]):
        messages = [life.take(stop) for life, stop in takes]
        drafts = runner.propose([first.ask(), second.ask()], GAMMA, messages)
        for life, draft in zip((first, second), drafts, strict=True):
            assert_like_twin(twin, life, draft, GAMMA, FLAVOURS[name].candidates)


@CHAIN_OR_BLOCK
def test_rows_that_overflow_reach_nobody_who_is_drafted_beside_them_or_gets_their_blocks_later(
    name: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    flavour = FLAVOURS[name]
    runner, twin = runner_and_twin(flavour, tmp_path, write_target)
    broken, longer, fine = lives(np.random.default_rng(1), twin, 40)[:3]
    broken.features[:] = torch.inf
    for life, first_block in ((broken, 1), (longer, 11), (fine, 21)):
        life.block_ids = np.arange(first_block, first_block + 10, dtype=np.int32)
    for _ in range(2):
        messages = [broken.take(12), longer.take(12), fine.take(9)]
        drafts = runner.propose([broken.ask(), longer.ask(), fine.ask()], GAMMA, messages)
        assert all(0 <= token < 64 for token in drafts[0].token_ids)
        for life, draft in zip((longer, fine), drafts[1:], strict=True):
            assert_like_twin(twin, life, draft, GAMMA, flavour.candidates)
        fine.block_ids, broken.block_ids = broken.block_ids, fine.block_ids
        broken.num_absorbed = longer.num_absorbed = fine.num_absorbed = 0
