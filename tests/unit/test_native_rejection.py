"""Rejection sampling in one native call against a twin in float64, decision by decision."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.wire import Extension, SamplingParams
from verifier import native_rejection
from verifier.acceptance import judge
from verifier.sampling import SamplingTable, transform

pytestmark = pytest.mark.skipif(
    not native_rejection.usable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no compiler, or no AVX512-BF16"
)


def table_of(count: int, temperature: float = 1.0, **cuts: float) -> SamplingTable:
    return SamplingTable.build([SamplingParams(temperature=temperature, **cuts)] * count, "cpu")


def law_of(logits: torch.Tensor, temperature: float, **cuts: float) -> np.ndarray:
    params = SamplingParams(temperature=temperature, **cuts)
    return transform(logits.double(), SamplingTable.build([params] * len(logits), "cpu")).numpy()


def some_q(rng: np.random.Generator, num_columns: int, width: int, draft: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids with the draft among them, the last of them padding, and probabilities that sum to 1."""
    ids = rng.permutation(num_columns)[:width]
    if draft not in ids:
        ids[0] = draft
    probs = rng.dirichlet(np.full(width, 0.5)).astype(np.float32) + np.float32(1e-3)
    if width > 2:
        padding = next(i for i in range(width - 1, -1, -1) if ids[i] != draft)
        probs[padding] = 0.0
    return ids, probs / probs.sum()


def residual_of(p: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> np.ndarray:
    q = np.zeros(len(p))
    q[ids[probs > 0]] = probs[probs > 0]
    residual = np.maximum(0.0, p - q)
    return residual if residual.sum() > 1e-8 else p


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("num_columns", "width"), [(7, 3), (16, 16), (500, 64), (1025, 8), (49_152, 64), (6000, 6000)])
@pytest.mark.parametrize(
    ("temperature", "cuts"),
    [
        (0.05, {}), (1.0, {}), (4.0, {}), (1.0, {"top_p": 0.9}), (4.0, {"top_k": 5}), (2.0, {"min_p": 0.1}),
        (4.0, {"top_k": 40, "top_p": 0.8, "min_p": 0.02}),
    ],
)  # fmt: skip
def test_every_decision_is_that_of_the_twin(
    num_columns: int, width: int, temperature: float, cuts: dict[str, float], num_threads: int
) -> None:
    rng = np.random.default_rng(num_columns + width)
    num_draft = np.array([0, 1, 3, 7, 2, 0, 5])
    first_draft = np.cumsum(num_draft) - num_draft
    # rows of others stand between
    first_row = np.cumsum(num_draft + 2) - num_draft - 1
    num_rows, num_drafts = int(first_row[-1] + num_draft[-1] + 2), int(num_draft.sum())
    logits = torch.from_numpy(rng.normal(size=(num_rows, num_columns)) * 3).to(torch.bfloat16)
    laws = law_of(logits, temperature, **cuts)
    owner = np.repeat(np.arange(len(num_draft)), num_draft)
    rows = first_row[owner] + np.arange(num_drafts) - first_draft[owner]
    # likely tokens, so that some are accepted
    drafts = np.array([rng.choice(num_columns, p=laws[row]) for row in rows])
    laws_q = [some_q(rng, num_columns, width, draft) for draft in drafts]
    q_ids, q_probs = np.stack([ids for ids, _ in laws_q]), np.stack([probs for _, probs in laws_q])
    q_of_drafts = np.array(
        [float(probs[ids == draft][0]) for (ids, probs), draft in zip(laws_q, drafts, strict=True)], dtype=np.float64
    )
    noise = torch.rand(num_drafts + len(num_draft), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        accepted, tokens, tops = native_rejection.reject(
            logits, first_row=first_row, num_draft=num_draft, first_draft=first_draft, drafts=drafts,
            table=table_of(len(num_draft), temperature, **cuts), output_index=num_draft, q_ids=q_ids,
            q_probs=q_probs, q_of_drafts=q_of_drafts, generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads_before)
    passed = [float(noise[d]) * q_of_drafts[d] < laws[rows[d], drafts[d]] for d in range(num_drafts)]
    assert (any(passed) and not all(passed)) or temperature != 1.0 or cuts or num_columns > 5000
    for i, count in enumerate(num_draft):
        mine = passed[first_draft[i] : first_draft[i] + count]
        expected = mine.index(False) if False in mine else count
        assert accepted[i] == expected
        weights = laws[first_row[i] + expected]
        if expected < count:
            weights = residual_of(weights, *laws_q[first_draft[i] + expected])
        reached = np.cumsum(weights) / weights.sum()
        token, drawn = int(tokens[i]), float(noise[num_drafts + i])
        assert weights[token] > 0.0
        assert (reached[token - 1] if token else 0.0) - 1e-5 <= drawn <= reached[token] + 1e-5
        read = slice(first_row[i], first_row[i] + expected + 1)
        assert tops[read].tolist() == logits[read].float().amax(1).tolist()


def call(logits: torch.Tensor, q_probs: list[float], seed: int = 0) -> tuple[int, int, float]:
    """One request with one draft, token 0, of which q has mass on the first columns."""
    accepted, tokens, tops = native_rejection.reject(
        logits.to(torch.bfloat16), first_row=np.array([0]), num_draft=np.array([1]), first_draft=np.array([0]),
        drafts=np.array([0]), table=table_of(1), output_index=np.array([0]), q_ids=np.arange(len(q_probs))[None],
        q_probs=np.array([q_probs], dtype=np.float32), q_of_drafts=np.array([q_probs[0]], dtype=np.float64),
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return int(accepted[0]), int(tokens[0]), float(tops[0])


def test_where_q_leaves_nothing_the_target_is_drawn_from() -> None:
    """q is nowhere below p, so that the residual has no mass."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    drawn = [
        token for accepted, token, _ in (call(logits, [2.0, 1.0, 1.0], seed) for seed in range(300)) if not accepted
    ]
    assert len(drawn) > 50
    law = law_of(logits[0], 1.0)
    counts = np.bincount(drawn, minlength=3)
    assert stats.chisquare(counts, law * len(drawn)).pvalue > 1e-3


def test_a_draft_that_is_rejected_is_not_drawn_again_where_q_covers_it() -> None:
    logits = torch.zeros(2, 40)
    outcomes = [call(logits, [1.0], seed) for seed in range(300)]
    assert {token for accepted, token, _ in outcomes if not accepted} <= set(range(1, 40))
    assert sum(not accepted for accepted, *_ in outcomes) > 250


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 17, 599])
def test_rows_without_a_law_say_so(bad: float, column: int) -> None:
    logits = torch.zeros(2, 600)
    logits[0, column] = bad
    assert not np.isfinite(call(logits, [1.0])[2])
    assert not np.isfinite(call(torch.full((2, 600), -torch.inf), [1.0])[2])


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 555:560] = 0.0
    for seed in range(200):
        accepted, token, _ = call(logits, [1.0], seed)
        assert accepted == 0 and 555 <= token < 560


def test_a_law_over_a_large_vocabulary_needs_no_large_stack() -> None:
    """With `ulimit -s unlimited` a thread has 2 MiB, and a q over 262,144 tokens filled them."""
    num_columns, outcomes = 262_144, []
    logits = torch.zeros(2, num_columns)
    q = [100.0] + [1.0 / num_columns] * (num_columns - 1)
    threads_before, stack_before = torch.get_num_threads(), threading.stack_size(1 << 20)
    torch.set_num_threads(1)
    try:
        thread = threading.Thread(target=lambda: outcomes.append(call(logits, q)))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads_before)
        threading.stack_size(stack_before)
    assert [accepted for accepted, *_ in outcomes] == [0]


@pytest.mark.parametrize("rows_of_others", [False, True])
def test_in_a_mixed_batch_everyone_gets_what_is_his(rows_of_others: bool) -> None:
    """Greedy and truncated requests beside sampled ones; a likely draft is accepted, an impossible one is not."""
    logits = torch.full((8, 50), -20.0)
    logits[torch.arange(8), torch.arange(8) + 10] = 20.0
    kinds = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)]
    if rows_of_others:
        kinds[2] = SamplingParams(temperature=1.0, top_p=0.5)
    extensions = [
        Extension(
            request_id=str(i), start=5, token_ids=np.array([0, *drafts], dtype=np.int32), num_draft=len(drafts), samples=True,
            block_ids=np.zeros(1, dtype=np.int32), params=params, output_index=0,
        )
        for i, (params, drafts) in enumerate(zip([*kinds, kinds[0]], ([10], [12, 9], [15], [17]), strict=True))
    ]  # fmt: skip
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7])
    verdicts = judge(
        logits=logits[rows].to(torch.bfloat16), extensions=extensions, generator=torch.Generator().manual_seed(1)
    )
    assert [v.num_accepted for v in verdicts] == [1, 1, 1, 1]
    assert [v.token_ids for v in verdicts] == [(10, 11), (12, 13), (15, 16), (17, 17)]
