"""Acceptance against the exact law: a numpy twin, chi-square with controls that must fail, and the seeded guarantee."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.wire import Extension, SamplingParams, Verdict
from verifier import native_rejection
from verifier.acceptance import judge
from verifier.sampling import SamplingTable, draw, seeded_pick, transform

GREEDY, SAMPLED, SEEDED = SamplingParams(temperature=0), SamplingParams(), SamplingParams(seed=11)

both_ways = pytest.mark.parametrize("judged_by", ["torch", "native"], indirect=True)


@pytest.fixture(autouse=True)
def judged_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators, which every machine has, unless a test asks for the native call where it runs."""
    if getattr(request, "param", "torch") == "torch":
        monkeypatch.setattr(native_rejection, "usable", lambda logits: False)


def extension(
    params: SamplingParams,
    drafts: Sequence[int] = (),
    *,
    name: str = "r",
    output_index: int = 0,
    q_ids: np.ndarray | None = None,
    q_probs: np.ndarray | None = None,
) -> Extension:
    return Extension(
        request_id=name,
        start=10,
        token_ids=np.array([0, *drafts], dtype=np.int32),
        num_draft=len(drafts),
        samples=True,
        block_ids=np.zeros(1, dtype=np.int32),
        params=params,
        output_index=output_index,
        q_ids=q_ids,
        q_probs=q_probs,
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law_of(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """[S, V] float64."""
    return transform(logits.double(), SamplingTable.build([params] * len(logits), "cpu")).numpy()


def fit(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of a chi-square test; cells of small expectation are pooled, impossible ones must be empty."""
    expected = law.astype(np.float64).ravel() / law.sum(dtype=np.float64) * counts.sum()
    counts = counts.ravel()
    if counts[expected == 0].sum():
        return 0.0
    rare = expected < 10
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


# --- a slow twin


def slow_judge(
    p: np.ndarray, q: np.ndarray, drafts: Sequence[int], rng: np.random.Generator, *, residual_from_p: bool = False
) -> list[int]:
    """p [n + 1, V], q [n, V] -> emitted ids, one by one. residual_from_p is a mistake the tests must notice."""
    for k, draft in enumerate(drafts):
        if rng.random() < p[k, draft] / q[k, draft]:
            continue
        residual = p[k] if residual_from_p else np.maximum(0, p[k] - q[k])
        if residual.sum() <= 1e-8:
            residual = p[k]
        return [*drafts[:k], int(rng.choice(len(residual), p=residual / residual.sum()))]
    return [*drafts, int(rng.choice(p.shape[1], p=p[len(drafts)] / p[len(drafts)].sum()))]


# --- the law of what is emitted, through the drafter's own draw


class MarkovPair:
    """Target and drafter whose law depends on the previous token, so that a wrong prefix shows in the next token."""

    def __init__(self, width: int, seed: int, *, num_candidates: int, dtype: torch.dtype = torch.float32) -> None:
        self.target = (torch.randn(width, width, generator=generator(seed)) * 1.5).to(dtype)
        noise = torch.randn(width, width, generator=generator(seed + 1))
        best = (self.target.float() + noise).topk(num_candidates, dim=-1)
        self.draft_logits, self.draft_ids = best.values.to(dtype), best.indices

    def propose(
        self, params: SamplingParams, count: int, num_draft: int, *, greedily: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [N, w], q_ids and q_probs [N, w, K] of drafts after token 0."""
        noise = generator(1)
        table = SamplingTable.build([params], "cpu").take(np.zeros(count, dtype=np.int64))
        previous, rounds = torch.zeros(count, dtype=torch.int64), []
        for k in range(num_draft):
            candidates, positions = self.draft_ids[previous], torch.full((count,), k)
            previous, law = draw(self.draft_logits[previous], candidates, table, positions, noise)
            assert law is not None
            if greedily:
                previous = candidates.gather(1, law.argmax(dim=1, keepdim=True))[:, 0]
            rounds.append((previous, candidates, law))
        ids, q_ids, q_probs = (torch.stack(column, dim=1) for column in zip(*rounds, strict=True))
        return ids, q_ids, q_probs

    def first_two(
        self, params: SamplingParams, count: int, num_draft: int, *, greedily: bool = False, with_q: bool = True
    ) -> np.ndarray:
        """[V, V] counts of the first two tokens that `count` requests emit after token 0, in one round or two."""
        ids, q_ids, q_probs = self.propose(params, count, num_draft, greedily=greedily)
        judging, q = generator(2), list(zip(q_ids.numpy(), q_probs.numpy(), strict=True))
        made = [
            extension(params, drafts, q_ids=q[i][0] if with_q else None, q_probs=q[i][1] if with_q else None)
            for i, drafts in enumerate(ids.tolist())
        ]
        previous = torch.cat([torch.zeros(count, 1, dtype=torch.int64), ids], dim=1)
        verdicts = judge(logits=self.target[previous.flatten()], extensions=made, generator=judging)
        tokens = [v.token_ids for v in verdicts]
        short = [i for i, emitted in enumerate(tokens) if len(emitted) == 1]
        more = judge(
            logits=self.target[[tokens[i][0] for i in short]],
            extensions=[extension(params)] * len(short),
            generator=judging,
        )
        for i, verdict in zip(short, more, strict=True):
            tokens[i] = tokens[i] + verdict.token_ids
        width = len(self.target)
        return np.bincount([t[0] * width + t[1] for t in tokens], minlength=width**2).reshape(width, width)

    def exact_two(self, params: SamplingParams) -> np.ndarray:
        law = law_of(self.target, params)
        return law[0][:, None] * law


REGIMES = [
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=1.7, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.8),
]


def brief(params: SamplingParams) -> str:
    return f"T{params.temperature} k{params.top_k} p{params.top_p} min{params.min_p}"


@pytest.mark.parametrize("params", REGIMES, ids=brief)
def test_emitted_tokens_follow_the_target_exactly(params: SamplingParams) -> None:
    pair = MarkovPair(6, seed=3, num_candidates=4)
    counts = pair.first_two(params, 50_000, num_draft=2)
    assert fit(counts, pair.exact_two(params)) > 1e-3


@pytest.mark.parametrize("num_draft", [0, 1, 5])
def test_the_law_does_not_depend_on_how_many_drafts_were_admitted(num_draft: int) -> None:
    pair = MarkovPair(5, seed=8, num_candidates=5)
    if num_draft == 0:
        plain = judge(logits=pair.target[[0] * 16_000], extensions=[extension(SAMPLED)] * 16_000, generator=generator())
        counts, law = np.bincount([v.token_ids[0] for v in plain], minlength=5), law_of(pair.target[:1], SAMPLED)
    else:
        counts, law = pair.first_two(SAMPLED, 16_000, num_draft), pair.exact_two(SAMPLED)
    assert fit(counts, law) > 1e-3


def test_drafts_from_outside_the_nucleus_are_rejected_without_bending_the_law() -> None:
    pair = MarkovPair(6, seed=3, num_candidates=4)
    law = law_of(pair.target, SamplingParams(top_p=0.6))
    inside = (np.take_along_axis(law, pair.draft_ids.numpy(), axis=1) > 0).mean()
    assert inside < 0.7  # much of what the drafter proposes has no mass in the target
    assert fit(pair.first_two(SamplingParams(top_p=0.6), 16_000, 2), law[0][:, None] * law) > 1e-3


@both_ways
def test_bfloat16_logits_at_rounding_edges_do_not_bias_the_law() -> None:
    pair = MarkovPair(6, seed=5, num_candidates=5, dtype=torch.bfloat16)
    edges = (pair.target.float() * (1 + 2.0**-8)).bfloat16()  # half an ulp away from where they were
    pair.target = torch.where(torch.rand(6, 6, generator=generator(4)) < 0.5, pair.target, edges)
    assert fit(pair.first_two(SAMPLED, 30_000, 2), pair.exact_two(SAMPLED)) > 1e-3


def test_greedy_drafts_judged_as_if_they_were_sampled_are_noticed() -> None:
    pair = MarkovPair(6, seed=3, num_candidates=4)
    counts = pair.first_two(SAMPLED, 16_000, 2, greedily=True)
    assert fit(counts, pair.exact_two(SAMPLED)) < 1e-6


def test_drafts_judged_without_q_keep_the_law_however_they_were_made() -> None:
    pair = MarkovPair(6, seed=3, num_candidates=4)
    for greedily in (False, True):
        counts = pair.first_two(SAMPLED, 16_000, 2, greedily=greedily, with_q=False)
        assert fit(counts, pair.exact_two(SAMPLED)) > 1e-3


def test_the_slow_twin_is_exact_and_its_residual_mistake_is_noticed() -> None:
    p, q = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), np.array([[0.2, 0.3, 0.5]])
    for mistaken in (False, True):
        rng = np.random.default_rng(0)
        drafts = rng.choice(3, size=20_000, p=q[0])
        emitted = [slow_judge(p, q, [int(d)], rng, residual_from_p=mistaken)[0] for d in drafts]
        assert (fit(np.bincount(emitted, minlength=3), p[0]) < 1e-6) == mistaken


def test_accepted_counts_are_distributed_as_the_slow_twin_s() -> None:
    rng = np.random.default_rng(5)
    logits, num_draft, count = torch.randn(4, 5, generator=generator(6)), 3, 12_000
    p, q = law_of(logits, SAMPLED), rng.dirichlet(np.ones(5), size=num_draft).astype(np.float32)
    drafts = np.stack([rng.choice(5, size=count, p=row / row.sum(dtype=np.float64)) for row in q], axis=1)
    q_ids = np.tile(np.arange(5), (num_draft, 1))
    made = [extension(SAMPLED, d, q_ids=q_ids, q_probs=q) for d in drafts]
    verdicts = judge(logits=logits.repeat(count, 1), extensions=made, generator=generator())
    ours = np.bincount([v.num_accepted for v in verdicts], minlength=4)
    rate = np.minimum(p[:3], q).sum(axis=1)
    reach = np.append(1, np.cumprod(rate))
    assert fit(ours, reach * np.append(1 - rate, 1)) > 1e-3
    twin = np.bincount([len(slow_judge(p, q, d.tolist(), rng)) - 1 for d in drafts], minlength=4)
    assert fit(twin, reach * np.append(1 - rate, 1)) > 1e-3


@both_ways
def test_certain_drafts_without_q_keep_the_law_and_are_never_their_own_replacement() -> None:
    logits = torch.randn(1, 8, generator=generator(2))
    made = [extension(SAMPLED, [3])] * 30_000
    verdicts = judge(logits=logits.repeat(60_000, 1), extensions=made, generator=generator())
    counts = np.bincount([v.token_ids[0] for v in verdicts], minlength=8)
    assert fit(counts, law_of(logits, SAMPLED)[0]) > 1e-3
    assert all(v.num_accepted == 1 for v in verdicts if v.token_ids[0] == 3)


@pytest.mark.parametrize("admit", ["always one", "global search"])
def test_the_counterexample_of_a_scheduler_that_looks_ahead(admit: str) -> None:
    """p = (0.7, 0.3), q = (0.5, 0.5). Admitting x_1 only when it is A gives Pr(A) = 0.85; always, 0.7."""
    count = 60_000
    logits = torch.tensor([0.7, 0.3]).log()
    drafts = torch.randint(0, 2, (count,), generator=generator(3)).tolist()
    q_ids, q_probs = np.array([[0, 1]]), np.full((1, 2), 0.5, dtype=np.float32)
    admitted = [draft == 0 or admit == "always one" for draft in drafts]
    made = [
        extension(SAMPLED, [d], q_ids=q_ids, q_probs=q_probs) if a else extension(SAMPLED)
        for d, a in zip(drafts, admitted, strict=True)
    ]
    verdicts = judge(logits=logits.expand(count + sum(admitted), 2), extensions=made, generator=generator(4))
    share = np.mean([v.token_ids[0] == 0 for v in verdicts])
    assert share == pytest.approx(0.7 if admit == "always one" else 0.85, abs=0.008)


def test_a_wide_vocabulary_follows_the_law_too() -> None:
    """Two-level draws, residuals and a q much narrower than the vocabulary."""
    width, count = 1024, 6000
    logits = torch.randn(1, width, generator=generator(1)) * 2
    best = (logits[0] + torch.randn(width, generator=generator(2))).topk(16)
    table = SamplingTable.build([SAMPLED], "cpu").take(np.zeros(count, dtype=np.int64))
    ids, q = draw(
        best.values.expand(count, 16), best.indices.expand(count, 16), table, torch.zeros(count), generator(3)
    )
    assert q is not None
    q_ids, q_probs = best.indices[None].numpy(), q[:1].numpy()
    made = [extension(SAMPLED, [i], q_ids=q_ids, q_probs=q_probs) for i in ids.tolist()]
    judging = generator(4)
    verdicts = [
        v
        for i in range(0, count, 500)
        for v in judge(logits=logits.expand(1000, width), extensions=made[i : i + 500], generator=judging)
    ]
    law = law_of(logits, SAMPLED)[0]
    assert fit(np.bincount([v.token_ids[0] for v in verdicts], minlength=width), law) > 1e-3
    bonus = [v.token_ids[1] for v in verdicts if v.num_accepted]
    assert len(bonus) > 1000 and fit(np.bincount(bonus, minlength=width), law) > 1e-3


@both_ways
def test_no_residual_mass_falls_back_to_the_target() -> None:
    """A q that lies above p everywhere leaves nothing to draw a replacement from."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    q_probs = 4 * law_of(logits, SAMPLED).astype(np.float32)
    made = [extension(SAMPLED, [2], q_ids=np.arange(3)[None], q_probs=q_probs)] * 20_000
    verdicts = judge(logits=logits.repeat(40_000, 1), extensions=made, generator=generator())
    replaced = [v.token_ids[0] for v in verdicts if v.num_accepted == 0]
    assert len(replaced) == pytest.approx(15_000, abs=400)
    assert fit(np.bincount(replaced, minlength=3), law_of(logits, SAMPLED)[0]) > 1e-3


@both_ways
def test_padding_of_q_has_no_mass_whatever_it_says() -> None:
    logits = torch.tensor([[3.0, 0.0]]).repeat(2, 1)
    padded = extension(SAMPLED, [0], q_ids=np.array([[0, -1]]), q_probs=np.array([[1.0, 9.0]], dtype=np.float32))
    plain = extension(SAMPLED, [0], q_ids=np.array([[0]]), q_probs=np.ones((1, 1), dtype=np.float32))
    for seed in range(50):
        answers = [judge(logits=logits, extensions=[e], generator=generator(seed)) for e in (padded, plain)]
        assert answers[0] == answers[1]


@both_ways
@pytest.mark.parametrize("ids", [[2, 2, 0, 1], [0, 2, 1, 2], [2, 0, 2, 2]])
def test_a_q_that_names_an_id_twice_means_the_sum(ids: list[int]) -> None:
    """It is no law that a drafter should send, and must bend nothing: were both parts taken off p by themselves, too much would
    be left of the id, and too little of the others."""
    logits = torch.tensor([[1.0, 0.5, 0.0, 0.8]])
    q_probs = np.array([[0.3, 0.3, 0.2, 0.2]], dtype=np.float32)
    drafts = np.array(ids)[np.random.default_rng(0).choice(4, 20_000, p=[0.3, 0.3, 0.2, 0.2])]
    made = [extension(SAMPLED, [int(draft)], q_ids=np.array([ids]), q_probs=q_probs) for draft in drafts]
    verdicts = judge(logits=logits.repeat(40_000, 1), extensions=made, generator=generator())
    assert fit(np.bincount([v.token_ids[0] for v in verdicts], minlength=4), law_of(logits, SAMPLED)[0]) > 1e-3


@both_ways
def test_a_q_that_is_not_finite_is_set_aside_and_the_law_kept() -> None:
    logits = torch.randn(1, 4, generator=generator(1))
    broken = np.array([[0.5, np.nan, 0.5, 0.0]], dtype=np.float32)
    made = [extension(SAMPLED, [2], q_ids=np.arange(4)[None], q_probs=broken)] * 20_000
    verdicts = judge(logits=logits.repeat(40_000, 1), extensions=made, generator=generator())
    assert fit(np.bincount([v.token_ids[0] for v in verdicts], minlength=4), law_of(logits, SAMPLED)[0]) > 1e-3


# --- drafters that know everything or nothing


def target_tokens(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """What the target itself takes at each row, at output positions 0, 1, ..."""
    if params.greedy:
        return logits.argmax(-1).tolist()
    table = SamplingTable.build([params] * len(logits), "cpu")
    return seeded_pick(logits, table, torch.arange(len(logits))).tolist()


@both_ways
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("width", [50, 1024])
def test_an_oracle_is_always_accepted_and_an_adversary_never(params: SamplingParams, width: int) -> None:
    logits = torch.randn(8, width, generator=generator(7))
    wanted = target_tokens(logits, params)
    assert judge(logits=logits, extensions=[extension(params, wanted[:7])]) == [Verdict("r", 7, tuple(wanted))]
    wrong = [(t + 1) % width for t in wanted]
    assert judge(logits=logits, extensions=[extension(params, wrong[:7])]) == [Verdict("r", 0, (wanted[0],))]
    late = [*wanted[:4], *wrong[4:7]]
    assert judge(logits=logits, extensions=[extension(params, late)]) == [Verdict("r", 4, tuple(wanted[:5]))]


@both_ways
def test_a_sampled_draft_of_the_target_s_own_law_is_always_accepted() -> None:
    logits = torch.randn(8, 50, generator=generator(7))
    q_probs, q_ids = (
        transform(logits[:7], SamplingTable.build([SAMPLED] * 7, "cpu")).numpy(),
        np.tile(np.arange(50), (7, 1)),
    )
    for seed in range(50):
        drafts = [int(np.random.default_rng(seed).choice(50, p=row / row.sum(dtype=np.float64))) for row in q_probs]
        made = extension(SAMPLED, drafts, q_ids=q_ids, q_probs=q_probs)
        verdict = judge(logits=logits, extensions=[made], generator=generator(seed))[0]
        assert verdict.num_accepted == 7 and verdict.token_ids[:7] == tuple(drafts)


@both_ways
def test_a_sampled_draft_outside_the_target_s_support_is_never_accepted() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0]]).repeat(2, 1)
    for seed in range(50):
        made = extension(SamplingParams(top_k=2), [3])
        verdict = judge(logits=logits, extensions=[made], generator=generator(seed))[0]
        assert verdict.num_accepted == 0 and verdict.token_ids[0] in (0, 1)


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    logits = torch.zeros(2, 1024)
    logits[:, [300, 700]] = 1
    assert judge(logits=logits, extensions=[extension(GREEDY, [700])]) == [Verdict("r", 0, (300,))]
    assert judge(logits=logits, extensions=[extension(GREEDY, [300])]) == [Verdict("r", 1, (300, 300))]


@both_ways
def test_a_tiny_top_p_at_any_temperature_is_greedy() -> None:
    logits = torch.randn(3, 40, generator=generator(9))
    wanted = tuple(logits.argmax(-1).tolist())
    for params in (SamplingParams(temperature=1.7, top_p=1e-6), SamplingParams(temperature=0, top_p=0.5, top_k=3)):
        for draft in (wanted[:2], (wanted[0], (wanted[1] + 1) % 40)):
            verdict = judge(logits=logits, extensions=[extension(params, draft)], generator=generator())[0]
            assert verdict.token_ids == wanted[: verdict.num_accepted + 1]
            assert verdict.num_accepted == (2 if draft == wanted[:2] else 1)


# --- mixed batches


@both_ways
@pytest.mark.parametrize("width", [30, 1024])
def test_a_mixed_batch_gives_each_request_what_it_gets_alone(width: int) -> None:
    rng = np.random.default_rng(1)
    kinds = [GREEDY, SEEDED, SAMPLED, SamplingParams(seed=4, top_p=0.7), SamplingParams(top_k=1), GREEDY]
    extensions, rows = [], []
    for i in range(40):
        params, num_draft = kinds[i % len(kinds)], int(rng.integers(0, 8))
        logits = torch.randn(num_draft + 1, width, generator=generator(i))
        drafts = logits.argmax(-1)[:num_draft].tolist()
        if num_draft > 3:
            drafts[rng.integers(0, num_draft)] = 5
        extensions.append(extension(params, drafts, name=f"r{i}", output_index=i))
        rows.append(logits)
    verdicts = judge(logits=torch.cat(rows), extensions=extensions, generator=generator())
    assert [v.request_id for v in verdicts] == [e.request_id for e in extensions]
    for made, logits, verdict in zip(extensions, rows, verdicts, strict=True):
        assert len(verdict.token_ids) == verdict.num_accepted + 1 <= made.num_draft + 1
        assert verdict.token_ids[: verdict.num_accepted] == tuple(made.token_ids[1:].tolist())[: verdict.num_accepted]
        if made.params is not SAMPLED:
            assert judge(logits=logits, extensions=[made], generator=generator(99)) == [verdict]


def test_no_extensions_give_no_verdicts() -> None:
    assert judge(logits=torch.zeros(0, 5), extensions=[]) == []


# --- the seeded guarantee


def decode(
    target: torch.Tensor, params: SamplingParams, length: int, drafter: Callable[[int, int], list[int]], crowd: int
) -> list[int]:
    """Text after token 0 of a Markov target, judged beside `crowd` other requests."""
    text: list[int] = []
    while len(text) < length:
        drafts = drafter(text[-1] if text else 0, len(text))
        mine = extension(params, drafts, output_index=len(text))
        others = [extension(kind, [1, 2]) for kind in [SAMPLED, GREEDY, SamplingParams(seed=5)] * crowd]
        rows = target[[text[-1] if text else 0, *drafts]]
        noise = torch.randn(9 * crowd, target.shape[1], generator=generator(len(text)))
        half = len(others) // 2
        verdict = judge(
            logits=torch.cat([noise[: 3 * half], rows, noise[3 * half :]]),
            extensions=[*others[:half], mine, *others[half:]],
            generator=generator(len(text)),
        )[half]
        text += verdict.token_ids
    return text[:length]


@both_ways
@pytest.mark.parametrize("width", [20, 1024])
@pytest.mark.parametrize("params", [SEEDED, SamplingParams(temperature=1.7, top_p=0.9, seed=-8)], ids=brief)
def test_a_seeded_text_is_the_same_with_any_drafts_and_in_any_batch(width: int, params: SamplingParams) -> None:
    target = torch.randn(width, width, generator=generator(12)) * 3
    table = SamplingTable.build([params], "cpu")

    def coupled(previous: int, position: int) -> list[int]:
        drafts = []
        for k in range(5):
            previous = int(draw(target[[previous]], None, table, torch.tensor([position + k]), None)[0])
            drafts.append(previous)
        return drafts

    plain = decode(target, params, 60, lambda previous, position: [], crowd=0)
    assert len(set(plain)) > 5
    for drafter in (
        coupled,
        lambda previous, position: [previous] * 7,
        lambda previous, position: target[previous].topk(3).indices.tolist(),
        lambda previous, position: coupled(previous, position)[: position % 4],
    ):
        assert decode(target, params, 60, drafter, crowd=0) == plain
        assert decode(target, params, 60, drafter, crowd=4) == plain
    assert decode(target, replace(params, seed=99), 60, coupled, crowd=0) != plain


# --- min_tokens


@both_ways
def test_stop_ids_cannot_appear_before_min_tokens_and_only_there() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 0.5]]).repeat(4, 1)
    before = logits.clone()
    params = replace(GREEDY, min_tokens=5, stop_ids=(2, 77))
    early = extension(params, [2, 1, 1], output_index=0)
    assert judge(logits=logits, extensions=[early]) == [Verdict("r", 0, (1,))]
    across = extension(params, [1, 1, 2], output_index=3)
    assert judge(logits=logits, extensions=[across]) == [Verdict("r", 3, (1, 1, 2, 2))]
    late = extension(params, [2, 2, 2], output_index=5)
    assert judge(logits=logits, extensions=[late]) == [Verdict("r", 3, (2, 2, 2, 2))]
    assert torch.equal(logits, before)


@both_ways
def test_min_tokens_of_one_request_leave_its_neighbours_alone() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]]).repeat(3, 1)
    held = replace(SAMPLED, min_tokens=1, stop_ids=(2,))
    for params in (held, replace(held, seed=3), replace(held, temperature=0)):
        verdicts = judge(
            logits=logits, extensions=[extension(GREEDY), extension(params), extension(GREEDY)], generator=generator()
        )
        assert [v.token_ids[0] == 2 for v in verdicts] == [True, False, True]


# --- faults


@both_ways
@pytest.mark.parametrize("params", [GREEDY, SEEDED, SAMPLED, SamplingParams(top_p=0.5), SamplingParams(top_k=4)])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [16, 1024])
def test_a_row_without_a_law_ends_its_own_request_and_no_other(
    params: SamplingParams, fault: float, width: int
) -> None:
    logits = torch.randn(4, width, generator=generator())
    if fault == -torch.inf:
        logits[2] = fault
    else:
        logits[2, 3] = fault
    broken = extension(params, [0], name="broken", output_index=7)
    found = judge(logits=logits, extensions=[extension(GREEDY, [1], name="fine"), broken], generator=generator())
    assert found[0] == judge(logits=logits[:2], extensions=[extension(GREEDY, [1], name="fine")])[0]
    assert found[1].error == ("InternalFault", "the target's logits are not finite at output position 7")
    assert (found[1].num_accepted, found[1].token_ids) == (0, ())


@both_ways
@pytest.mark.parametrize("params", [GREEDY, SEEDED, SAMPLED, replace(GREEDY, num_logprobs=1)])
@pytest.mark.parametrize("lawless", [1, 2, 3])
def test_drafts_accepted_before_a_row_without_a_law_stand_as_they_would_without_drafts(
    params: SamplingParams, lawless: int
) -> None:
    drafts = [3, 5, 4]
    logits = torch.full((4, 16), -40.0)
    for row, token in enumerate([*drafts, 9]):
        logits[row, token] = 40.0
    logits[lawless] = torch.nan
    (verdict,) = judge(logits=logits, extensions=[extension(params, drafts)], generator=generator())
    assert verdict.error is None
    assert (verdict.num_accepted, verdict.token_ids) == (lawless - 1, tuple(drafts[:lawless]))
    assert verdict.logprobs is None or len(verdict.logprobs) == lawless


@both_ways
def test_a_row_without_a_law_behind_a_rejected_draft_is_nobodys_business() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 2] = 9.0
    logits[1:] = torch.nan
    assert judge(logits=logits, extensions=[extension(GREEDY, [1, 2])])[0].token_ids == (2,)


@both_ways
def test_drafts_that_cannot_be_are_refused() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"num_draft \+ 1 rows per extension: 3; got 2"):
        judge(logits=logits, extensions=[extension(GREEDY, [1, 2])])
    with pytest.raises(ValueError, match=r"draft token ids must lie in 0\.\.3"):
        judge(logits=logits, extensions=[extension(GREEDY, [4])])
    with pytest.raises(ValueError, match="must sample"):
        judge(logits=logits, extensions=[replace(extension(GREEDY, [1]), samples=False)])
    for q_probs in ([[0.0, 1.0]], [[2.0, -1.0]]):
        made = extension(SAMPLED, [1], q_ids=np.array([[1, 2]]), q_probs=np.array(q_probs, dtype=np.float32))
        with pytest.raises(ValueError, match="q_probs of r must give"):
            judge(logits=logits, extensions=[made], generator=generator())
    made = extension(SAMPLED, [1], q_ids=np.array([[1, 4]]), q_probs=np.array([[0.5, 0.5]], dtype=np.float32))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"q_ids of r must lie in 0\.\.3"):
            judge(logits=logits.to(dtype), extensions=[made], generator=generator())
    made = extension(SAMPLED, [1], q_ids=np.zeros((2, 3)), q_probs=np.ones((2, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="q_ids and q_probs of r must both be"):
        judge(logits=logits, extensions=[made], generator=generator())
