"""Through the whole engine, on the trained tiny models: greedy ids, sampled laws and seeded texts are the target's own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from drafter.native_walk import NativeWalk
from scheduler.wire import Extension, SamplingParams
from tests.unit.drafter_twins import Flavour, write_drafter
from verifier import native
from verifier import runner as runner_module

PROMPTS = [[27], [43, 22, 45, 1, 2], [3, 19, 28, 0, 6, 17, 4, 5, 45, 9, 34, 43, 22], list(range(40)), [5, 6] * 20, [8]]
PLANNERS = ["off", *(f"fixed:{k}" for k in range(1, 8)), "threshold:0.5", "algorithm1", "auto"]
NUM_SAMPLES = 12000

needs_bfloat16 = pytest.mark.skipif(
    not native.packable(torch.zeros(32, 32, dtype=torch.bfloat16)), reason="needs AVX512-BF16 and a C compiler"
)


@pytest.fixture(scope="module")
def checkpoint_of(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | str]:
    """The trained drafters of the reference by name; an MTP module, of which it has none, with random weights."""
    mtp = write_drafter(tmp_path_factory.mktemp("mtp"), golden / "target", Flavour("qwen3", "none", design="mtp"))
    special: dict[str, Path | str] = {"ngram": "ngram", "mtp": mtp}
    return lambda name: special.get(name, golden / name)


@pytest.mark.parametrize("planner", PLANNERS)
async def test_greedy_ids_equal_the_dense_twin_under_every_planner(
    launch, golden: Path, golden_twin, planner: str
) -> None:
    expected = [golden_twin.greedy(prompt, 40) for prompt in PROMPTS]
    async with launch(golden / "target", golden / "dspark_vanilla", planner=planner, like_a_gpu=True) as engine:
        answers = await engine.ask(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
    assert [a.token_ids for a in answers] == expected


@pytest.mark.parametrize(
    ("drafter", "block_size", "num_blocks"), [("dspark_rnn", 1, 110), ("eagle3", 4, 30), ("dspark_rnn", 16, 9)]
)
async def test_greedy_ids_survive_preemption_in_a_pool_too_small_for_all(
    launch, golden: Path, golden_twin, drafter: str, block_size: int, num_blocks: int
) -> None:
    expected = [golden_twin.greedy(prompt, 40) for prompt in PROMPTS]
    async with launch(
        golden / "target", golden / drafter, block_size=block_size, num_blocks=num_blocks, prefill_chunk=7
    ) as engine:
        answers = await engine.ask(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
        stats = await engine.actor.snapshot()
    assert stats.num_preemptions > 0
    assert [a.token_ids for a in answers] == expected
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize(
    "drafter",
    ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_noconfmarkov", "dflash", "eagle3", "mtp", "ngram"],
)
async def test_seeded_text_is_the_same_alone_in_a_batch_without_drafts_and_under_every_planner(
    launch, golden: Path, checkpoint_of, drafter: str
) -> None:
    params = [SamplingParams(temperature=t, seed=s, top_p=p, max_tokens=30)
              for t, s, p in [(1.0, 1, 1.0), (0.7, 2, 0.9), (1.5, 3, 1.0), (1.0, 2**62, 0.8)]]  # fmt: skip
    cases = [(prompt, p) for prompt in PROMPTS[:2] for p in params]
    async with launch(golden / "target", None, planner="off") as engine:
        expected = [(await engine.ask([prompt], p))[0].token_ids for prompt, p in cases]
    async with launch(golden / "target", checkpoint_of(drafter), like_a_gpu=True) as engine:
        for planner in PLANNERS:
            await engine.actor.set_planner(planner)
            answers = await engine.ask([prompt for prompt, _ in cases], [p for _, p in cases])
            assert [a.token_ids for a in answers] == expected, planner
            assert planner in ("off", "threshold:0.5") or any(d.num_verified for a in answers for d in a.rounds)


@needs_bfloat16
@pytest.mark.parametrize(("family", "drafter"), [("llama", "ngram"), ("qwen3", "dspark")])
async def test_in_bfloat16_no_planner_and_no_batch_changes_a_token(
    launch, family: str, drafter: str, tmp_path: Path, write_target
) -> None:
    """Greedy and seeded text, bit for bit: native.c computes a row alike in every batch."""
    target = write_target(tmp_path / "target", family, head_dim=32, initializer_range=0.1)
    checkpoint = "ngram" if drafter == "ngram" else write_drafter(tmp_path, target, Flavour(family, "vanilla"))
    params = [
        SamplingParams(temperature=t, seed=None if t == 0 else 7, top_p=0.9, max_tokens=24) for t in (0.0, 0.8, 1.3)
    ]
    cases = [(prompt, p) for prompt in PROMPTS for p in params]
    async with launch(target, None, planner="off", dtype="bfloat16") as engine:
        expected = [(await engine.ask([prompt], p))[0].token_ids for prompt, p in cases]
    async with launch(target, checkpoint, like_a_gpu=True, dtype="bfloat16", prefill_chunk=7) as engine:
        for planner in ("fixed:1", "fixed:4", "fixed:7", "threshold:0.3", "auto"):
            await engine.actor.set_planner(planner)
            answers = await engine.ask([prompt for prompt, _ in cases], [p for _, p in cases])
            assert [a.token_ids for a in answers] == expected, planner
            assert not planner.startswith("fixed") or any(d.num_verified for a in answers for d in a.rounds)


def exact_law(twin, prompt: list[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens, by brute force over the dense twin and a numpy transform."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        heads = list(laws)
        rows = np.stack([transformed(r, params) for r in twin.logits([[*prompt, *h] for h in heads]).double().numpy()])
        laws = {
            (*head, token): laws[head] * float(row[token])
            for head, row in zip(heads, rows, strict=True)
            for token in np.flatnonzero(row)
        }
    return laws


def transformed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, each as everybody defines them, on one row."""
    law = np.exp((logits - logits.max()) / params.temperature)
    law /= law.sum()
    order = np.argsort(-law, kind="stable")
    keep = np.ones(len(law), dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    law = np.where(keep, law, 0) / law[keep].sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= params.top_p]] = 0
    return law / law.sum()


def p_value(law: dict[tuple[int, ...], float], seen: Counter[tuple[int, ...]]) -> float:
    """Chi-square of the observed continuations; cells expected less than 8 times are pooled."""
    assert not set(seen) - set(law), "a continuation that the law forbids"
    total = sum(seen.values())
    common = [c for c, p in law.items() if p * total >= 8]
    expected = [law[c] * total for c in common]
    observed = [seen[c] for c in common]
    rest, seen_rest = total - sum(expected), total - sum(observed)
    if rest > 1e-9 * total:
        expected, observed = [*expected, rest], [*observed, seen_rest]
    return float(chisquare(observed, np.array(expected) * (total / sum(expected))).pvalue)


CASES = [
    ("fixed:7", "dspark_vanilla", SamplingParams(temperature=1.0, max_tokens=3)),
    ("fixed:2", "dspark_rnn", SamplingParams(temperature=0.3, max_tokens=3)),
    ("threshold:0.1", "dspark_gated", SamplingParams(temperature=1.7, top_k=6, max_tokens=3)),
    ("algorithm1", "dspark_vanilla", SamplingParams(temperature=1.0, top_p=0.8, max_tokens=3)),
    ("auto", "dspark_vanilla", SamplingParams(temperature=1.3, top_p=0.9, max_tokens=3)),
    ("algorithm1", "dspark_noconfmarkov", SamplingParams(temperature=1.7, top_p=0.9, top_k=10, max_tokens=3)),
    ("fixed:7", "dflash", SamplingParams(temperature=1.7, top_p=0.95, max_tokens=3)),
    ("fixed:5", "eagle3", SamplingParams(temperature=1.0, max_tokens=3)),
    ("algorithm1", "mtp", SamplingParams(temperature=1.7, top_k=8, max_tokens=3)),
    ("fixed:3", "ngram", SamplingParams(temperature=1.0, max_tokens=3)),
]  # fmt: skip


async def sample(
    launch, target: Path, drafter: Path | str, planner: str, params: SamplingParams, **more: object
) -> Counter[tuple[int, ...]]:
    async with launch(
        target, drafter, planner=planner, candidates=16, max_live=100, max_waiting=NUM_SAMPLES,
        check_integrity=False, seed=11, like_a_gpu=True, **more,
    ) as engine:  # fmt: skip
        answers = await engine.ask([[17, 42, 17, 42, 17]] * NUM_SAMPLES, params)
        if drafter != "ngram" and planner != "off":
            assert (await engine.actor.snapshot()).num_accepted_tokens > 0
    return Counter(tuple(a.token_ids) for a in answers)


@pytest.mark.parametrize(
    ("planner", "drafter", "params"), CASES, ids=lambda v: v if isinstance(v, str) else f"T{v.temperature}"
)
async def test_sampled_continuations_follow_the_exact_law(
    launch, golden: Path, golden_twin, checkpoint_of, planner: str, drafter: str, params: SamplingParams
) -> None:
    law = exact_law(golden_twin, [17, 42, 17, 42, 17], params, params.max_tokens)
    assert abs(sum(law.values()) - 1) < 1e-9
    seen = await sample(launch, golden / "target", checkpoint_of(drafter), planner, params)
    assert p_value(law, seen) > 1e-4


@needs_bfloat16
async def test_drafts_drawn_natively_leave_the_law_as_it_is(
    launch, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where a row's logits are the same bits with and without drafts."""
    num_drawn, sampled = 0, NativeWalk.sampled

    def counted(self: NativeWalk, base: torch.Tensor, *rest: object) -> object:
        nonlocal num_drawn
        num_drawn += base.shape[0] * base.shape[1]
        return sampled(self, base, *rest)

    monkeypatch.setattr(NativeWalk, "sampled", counted)
    params = SamplingParams(temperature=1.3, top_p=0.95, max_tokens=3)
    both = [
        await sample(launch, golden / "target", golden / "dspark_vanilla", planner, params, dtype="bfloat16")
        for planner in ("off", "fixed:7")
    ]
    assert num_drawn > NUM_SAMPLES
    common = [c for c in both[0] | both[1] if both[0][c] + both[1][c] >= 16]
    table = [[seen[c] for c in common] + [NUM_SAMPLES - sum(seen[c] for c in common)] for seen in both]
    assert chi2_contingency(table).pvalue > 1e-4


async def test_the_law_test_notices_an_acceptance_that_uses_a_wrong_q(
    launch, golden: Path, golden_twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: drafts drawn from one law and judged by another (the temperature forgotten, say) must be seen."""
    honest = runner_module.judge

    def biased(*, logits: torch.Tensor, extensions, generator, masks):
        return honest(logits=logits, extensions=[flattened(e) for e in extensions], generator=generator)

    monkeypatch.setattr(runner_module, "judge", biased)
    planner, drafter, params = CASES[0]
    law = exact_law(golden_twin, [17, 42, 17, 42, 17], params, params.max_tokens)
    assert p_value(law, await sample(launch, golden / "target", golden / drafter, planner, params)) < 1e-6


def flattened(extension: Extension) -> Extension:
    if extension.q_probs is None:
        return extension
    return replace(extension, q_probs=np.full_like(extension.q_probs, 1 / extension.q_probs.shape[1]))


async def test_every_cached_row_of_a_committed_prefix_equals_a_fresh_prefill(launch, golden: Path) -> None:
    """For every verify width, whatever was rejected on the way: the KV cache holds the committed tokens' rows."""
    for width, drafter in itertools.product(range(1, 8), ["dspark_vanilla", "ngram"]):
        checkpoint = drafter if drafter == "ngram" else golden / drafter
        prompt, params = PROMPTS[4], SamplingParams(temperature=1.0, max_tokens=30)
        async with launch(golden / "target", checkpoint, planner=f"fixed:{width}") as engine:
            (answer,) = await engine.ask([prompt], params)
            ids = [*prompt, *answer.token_ids]
            served = cached_rows(engine, ids)
        async with launch(golden / "target", None, planner="off", prefill_chunk=1000) as engine:
            await engine.ask([ids], SamplingParams(temperature=0.0, max_tokens=1))
            torch.testing.assert_close(served, cached_rows(engine, ids), atol=2e-4, rtol=1e-4)


def cached_rows(engine, ids: list[int]) -> torch.Tensor:
    """Rows of the full blocks of `ids` in the prefix cache, all layers, [layers, rows, 2 KV, hd]."""
    cache = engine.core.residency.tables.cache
    blocks = cache.match(np.array(ids, dtype=np.int32)).blocks
    cache.give_back(blocks)
    assert len(blocks) == (len(ids) - 1) // 16
    return engine.runner.kv.pool[:, torch.tensor(blocks)].flatten(1, 2)
