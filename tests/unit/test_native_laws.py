"""The laws of rejection.c, cut and raced, against those of torch's operators: kept sets, seeded tokens, frequencies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.wire import Extension, SamplingParams
from verifier import native_rejection
from verifier.acceptance import judge
from verifier.sampling import SamplingTable, seeded_pick, transform

pytestmark = pytest.mark.skipif(
    not native_rejection.usable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no compiler, or no AVX512-BF16"
)

NEAR = 1e-6  # shares that rounding may take for equal


def answers(
    logits: torch.Tensor,
    table: SamplingTable,
    *,
    drafts: np.ndarray | None = None,
    q: tuple[np.ndarray, np.ndarray] | None = None,
    q_of_drafts: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Row i for request i, without drafts; or rows 0 and 1 for all, with one each, all drawn from q (ids and probabilities)."""
    count = len(table)
    rows = np.arange(count) if drafts is None else np.zeros(count, dtype=np.int64)
    of_each = np.zeros(0) if drafts is None else q_of_drafts
    ids, probs = (np.zeros(1, dtype=np.int64), np.zeros(1)) if q is None else q
    accepted, tokens, _ = native_rejection.reject(
        logits, first_row=rows, num_draft=np.full(count, int(drafts is not None)), first_draft=np.arange(count),
        drafts=np.zeros(0, dtype=np.int64) if drafts is None else drafts, table=table,
        output_index=np.zeros(count, dtype=np.int64) if positions is None else positions,
        q_ids=np.tile(ids, (count + 1, 1)), q_probs=np.tile(probs.astype(np.float32), (count + 1, 1)),
        q_of_drafts=of_each, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    return accepted, tokens


def some_logits(rng: np.random.Generator, width: int) -> torch.Tensor:
    """One row [V]: smooth, or so coarse that most columns tie, or equal everywhere, and often with tokens ruled out."""
    row = rng.normal(size=width) * rng.choice([0.3, 3.0, 12.0])
    row = [row, np.round(row), np.round(row / 4) * 4, np.full(width, 2.0)][rng.integers(4)]
    ruled_out = rng.random(width) < rng.choice([0.0, 0.0, 0.4, 0.999])
    ruled_out[rng.integers(width)] = False
    row[ruled_out] = -np.inf
    return torch.from_numpy(row).to(torch.bfloat16)


def some_params(rng: np.random.Generator, width: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.05, 0.7, 1.0, 2.0])),
        top_k=int(rng.choice([0, 0, 1, 2, 50, max(1, width // 2), width, 2**62])),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.999, 1e-9, 1e-320])),
        min_p=float(rng.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1 - 1e-9, 1.0])),
    )


def undecided(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """[V] which tokens rounding may keep or cut: where the nucleus may end, and about the bound of min-p. Float64, sorted."""
    weights = np.exp((logits.double() - logits.max().double()).numpy() / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = np.where(np.arange(len(weights)) < (params.top_k or len(weights)), weights[order], 0)
    before = (np.cumsum(kept) - kept) / kept.sum()
    ends = np.zeros(len(weights), dtype=bool)
    if params.top_p < 1:
        ends[order] = np.abs(before - params.top_p) < NEAR
        ends[order[0]] = False
    return (
        (weights > 0) & (weights < 1e-36)
        | ends
        | (np.abs(weights - params.min_p) < NEAR * params.min_p) & (weights < 1)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "num_cases"), [(1, 40), (5, 300), (1000, 150), (49_152, 40)])
def test_the_kept_tokens_are_those_of_torch(width: int, num_cases: int, dtype: torch.dtype) -> None:
    """Drafts proposed with next to no probability are accepted exactly where the law has any."""
    rng = np.random.default_rng(width)
    num_compared = num_different = num_undecided = num_cut = 0
    for _ in range(num_cases):
        logits, params = some_logits(rng, width), some_params(rng, width)
        law = transform(logits[None], SamplingTable.build([params], "cpu"))[0].numpy()
        kept = law > 1e-37
        probed = np.arange(width) if width <= 1000 else about_the_cut(rng, law, logits)
        table = SamplingTable.build([params], "cpu").take(np.zeros(len(probed), dtype=np.int64))
        one = (np.zeros(1, dtype=np.int64), np.ones(1))
        accepted, tokens = answers(
            logits.to(dtype).expand(2, -1), table, drafts=probed, q=one, q_of_drafts=np.full(len(probed), 1e-300)
        )
        open_ = undecided(logits, params)
        same = (accepted == 1) == kept[probed]
        assert (same | open_[probed]).all(), (params, probed[~same & ~open_[probed]])
        drawn = tokens[accepted == 1]
        assert (kept | open_)[drawn].all()
        num_compared += len(probed)
        num_different += int((~same).sum())
        num_undecided += int(open_[probed].sum())
        num_cut += int((~kept[probed] & np.isfinite(logits.float().numpy()[probed])).sum())
    assert num_different < 0.02 * num_compared and num_undecided < 0.2 * num_compared
    assert width == 1 or 0.1 * num_compared < num_cut < num_compared


def about_the_cut(rng: np.random.Generator, law: np.ndarray, logits: torch.Tensor) -> np.ndarray:
    """The likeliest tokens, the last that are kept, the first that are not, and any."""
    order = np.argsort(-logits.float().numpy(), kind="stable")
    end = int((law > 1e-37).sum())
    places = np.concatenate(
        ([0], np.arange(max(0, end - 10), min(len(order), end + 10)), rng.integers(0, len(order), 10))
    )
    return order[places]


def test_cuts_about_an_edge_of_equal_tokens_keep_the_lower_columns() -> None:
    logits = torch.zeros(2, 1000, dtype=torch.bfloat16)
    logits[:, 500:] = 1.0
    for params, num_kept in [({"top_k": 700}, 700), ({"top_p": 0.25}, 171), ({"top_k": 700, "min_p": 0.5}, 500)]:
        table = SamplingTable.build([SamplingParams(**params)], "cpu").take(np.zeros(1000, dtype=np.int64))
        accepted, _ = answers(
            logits,
            table,
            drafts=np.arange(1000),
            q=(np.zeros(1, dtype=np.int64), np.ones(1)),
            q_of_drafts=np.full(1000, 1e-300),
        )
        expected = [*range(500, min(1000, 500 + num_kept)), *range(num_kept - 500)]
        assert set(np.flatnonzero(accepted)) == set(expected), params


@pytest.mark.parametrize(
    ("width", "count"), [(1, 3), (5, 200), (300, 100), (512, 100), (1009, 100), (6000, 60), (49_152, 40)]
)
def test_seeded_tokens_are_those_of_torch_and_the_same_from_widened_logits(width: int, count: int) -> None:
    """Over narrow rows, over wide ones, over a prime number of columns; where the tail wins, too."""
    rng = np.random.default_rng(width)
    logits = torch.stack([some_logits(rng, width) for _ in range(count)])
    logits[: count // 3] = torch.from_numpy(rng.normal(size=(count // 3, width)) * 0.5).to(torch.bfloat16)
    params = [replace(some_params(rng, width), seed=int(rng.integers(-5, 2**62))) for _ in range(count)]
    params[: count // 3] = [SamplingParams(seed=i) for i in range(count // 3)]
    table, positions = SamplingTable.build(params, "cpu"), rng.integers(0, 5000, count)
    _, tokens = answers(logits, table, positions=positions)
    _, widened = answers(logits.float(), table, positions=positions)
    assert tokens.tolist() == widened.tolist()
    expected = seeded_pick(logits, table, torch.from_numpy(positions)).numpy()
    clear = np.array([not undecided(row, each).any() for row, each in zip(logits, params, strict=True)])
    assert tokens[clear].tolist() == expected[clear].tolist()
    assert (tokens == expected).mean() > 0.97 and clear.mean() > 0.5
    assert width < 100 or len(set(tokens.tolist())) > count // 4


@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]
)
@pytest.mark.parametrize(("width", "honest"), [(14, True), (14, False), (700, True)])
def test_emitted_tokens_come_as_often_as_the_cut_law_says(cuts: dict[str, float], width: int, honest: bool) -> None:
    """Accepted or drawn instead; where a draft is judged by another q than it came from, it shows."""
    rng, count = np.random.default_rng(3), 20_000
    logits = torch.from_numpy(rng.normal(size=(1, width)) * 0.8).to(torch.bfloat16).expand(2, -1)
    ids = np.argsort(-logits[0].float().numpy(), kind="stable")[:12]
    q = rng.dirichlet(np.ones(12)).astype(np.float32)
    claimed = q if honest else np.full(12, 1 / 12, dtype=np.float32)
    chosen = rng.choice(12, size=count, p=q.astype(np.float64) / q.sum(dtype=np.float64))
    table = SamplingTable.build([SamplingParams(**cuts)], "cpu").take(np.zeros(count, dtype=np.int64))
    accepted, tokens = answers(
        logits, table, drafts=ids[chosen], q=(ids, claimed), q_of_drafts=claimed[chosen].astype(np.float64)
    )
    emitted = np.where(accepted == 1, ids[chosen], tokens)
    law = transform(logits[:1].double(), SamplingTable.build([SamplingParams(**cuts)], "cpu"))[0].numpy()
    seen = np.bincount(emitted, minlength=width)
    assert not seen[law == 0].any()
    common = law * count > 8
    rest = [law[~common].sum() * count], [seen[~common].sum()]
    expected, observed = (np.concatenate(x) for x in ((law[common] * count, rest[0]), (seen[common], rest[1])))
    filled = expected > 0
    p_value = stats.chisquare(observed[filled], expected[filled] * (count / expected[filled].sum())).pvalue
    assert p_value > 1e-3 if honest else p_value < 1e-6


def ask(request_id: str, params: SamplingParams, drafts: list[int]) -> Extension:
    return Extension(
        request_id=request_id, start=5, token_ids=np.array([0, *drafts], dtype=np.int32), num_draft=len(drafts), samples=True,
        block_ids=np.zeros(1, dtype=np.int32), params=params, output_index=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "neighbour",
    [
        SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(logit_bias=((3, 2.0),)),
        SamplingParams(temperature=0, logit_bias=((3, 2.0),)), SamplingParams(seed=8, min_tokens=9, stop_ids=(4,)),
    ],
)  # fmt: skip
def test_a_seeded_verdict_is_the_same_alone_and_beside_anyone(neighbour: SamplingParams) -> None:
    """Somebody's bias widens the logits of all; a fresh draw, an argmax and a cut stand in the same call."""
    for seed in range(30):
        logits = torch.randn(6, 1200, generator=torch.Generator().manual_seed(seed)).mul_(3).to(torch.bfloat16)
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
        (first,) = judge(logits=logits[:1], extensions=[ask("a", params, [])])
        drafts = [first.token_ids[0], 7]
        (alone,) = judge(logits=logits[:3], extensions=[ask("a", params, drafts)])
        both = judge(logits=logits, extensions=[ask("a", params, drafts), ask("b", neighbour, [5, 6])])
        assert both[0] == alone and alone.num_accepted >= 1
        assert alone.token_ids[0] == first.token_ids[0]


def test_what_is_said_of_the_q_of_a_seeded_draft_is_not_asked_for() -> None:
    logits = torch.zeros(2, 50, dtype=torch.bfloat16)
    plain = ask("a", SamplingParams(seed=1), [4])
    strange = replace(plain, q_ids=np.array([[9]], dtype=np.int32), q_probs=np.array([[-1.0]], dtype=np.float32))
    assert judge(logits=logits, extensions=[plain]) == judge(logits=logits, extensions=[strange])
