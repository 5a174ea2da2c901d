"""planning.c decides what its twins in numpy decide."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler import kernels
from scheduler.admit import Planner, Rule, admit
from scheduler.belief import Belief
from scheduler.drift import ConfidenceDrift
from scheduler.estimates import AcceptanceEstimates, Spread
from scheduler.forecast import Prices, best_draft
from scheduler.outlook import Outlook
from scheduler.throughput import CostCurve, CurvePoints

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no C compiler here")

WIDTH = 7
SIZES = (1, 2, 3, 9, 40, 65, 300)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """What a function returns by planning.c and by numpy."""

    def run(work: Callable[[], Any]) -> tuple[Any, Any]:
        by_c = work()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "load", lambda: None)
            return by_c, work()

    return run


def drafts(rng: np.random.Generator, count: int, *, unsaid: float = 0.1) -> np.ndarray:
    """[count, WIDTH] confidences: some exactly 0 and 1, some equal, some not stated."""
    stated = rng.choice([0.0, 0.25, 0.5, 0.5, 1.0, -1.0], (count, WIDTH))
    stated = np.where(stated < 0.0, rng.random((count, WIDTH)), stated)
    return np.where(rng.random((count, WIDTH)) < unsaid, np.nan, stated)


def lived(seed: int, count: int, rounds: int) -> list[np.ndarray]:
    """Everything that is believed of drafts in so many rounds of a batch from which requests leave and others come."""
    rng = np.random.default_rng(seed)
    belief, seen = Belief(2 * count, WIDTH), []
    slots = rng.permutation(2 * count)[:count]
    for slot in slots:
        belief.welcome(slot, int(slot) % 4)
    for step in range(rounds):
        if step % 5 == 4:
            belief.welcome(int(slots[0]), int(rng.integers(4)))
        active = slots[rng.random(count) < 0.8] if count > 1 else slots
        if not len(active):
            continue
        size = len(active)
        caps, groups = rng.integers(1, WIDTH + 1, size), rng.integers(0, 8, size)
        judgement = belief.judge(active, groups, caps, drafts(rng, size, unsaid=0.3 * (step % 3)) + 0.0)
        outlook = belief.outlook(judgement, np.arange(size), caps, step)
        belief.remember(judgement, caps, step)
        verified = rng.integers(0, caps + 1)
        accepted = rng.integers(0, verified + 1)
        belief.pass_step()
        belief.observe(judgement, num_drafted=caps, num_verified=verified, num_accepted=accepted)
        seen += [
            judgement.believed,
            judgement.filled,
            judgement.usual,
            outlook,
            belief.spread,
            belief.usual(slots, caps[:1].repeat(count)),
        ]
        for row in belief.drift:
            seen += [np.array(sums) for sums in (row.trials, row.accepted, row.stated, row.believed)]
    return seen


@pytest.mark.parametrize("count", SIZES)
def test_what_is_believed_of_drafts_is_the_same_round_after_round(both: Any, count: int) -> None:
    by_c, by_numpy = both(lambda: lived(count, count, 60 if count < 50 else 15))
    assert len(by_c) == len(by_numpy) > 60
    for ours, theirs in zip(by_c, by_numpy, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [*SIZES, 3000])
def test_the_outlook_reads_the_newest_that_are_old_enough(both: Any, count: int) -> None:
    def read() -> list[np.ndarray]:
        rng = np.random.default_rng(count)
        outlook, seen = Outlook(count + 3, WIDTH), []
        for step in range(12):
            drafted = rng.random(count) < 0.7
            slots = (np.arange(count) + 3)[drafted]
            survival = np.cumprod(drafts(rng, len(slots)), axis=1)[:, : 1 + step % WIDTH]
            if len(slots):
                outlook.remember(slots, step, np.ascontiguousarray(survival))
            outlook.forget(int(rng.integers(count + 3)))
            width = 1 + int(rng.integers(WIDTH))
            caps, otherwise = rng.integers(0, width + 1, count), rng.random((count, width))
            seen.append(outlook.profile(np.arange(count) + 3, step, caps=caps, width=width, otherwise=otherwise))
        return seen

    for ours, theirs in zip(*both(read), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kv_token_s", [0.0, 3e-8])
@pytest.mark.parametrize("contexts", [(256,), (256, 1024, 4096)])
def test_steps_are_priced_the_same(both: Any, contexts: tuple[int, ...], kv_token_s: float) -> None:
    rng = np.random.default_rng(0)
    tokens = (1, 2, 4, 8, 16, 64)
    rows = 0.01 + np.cumsum(rng.random((len(contexts), len(tokens))), axis=1) / 300
    curve = CostCurve(CurvePoints(tokens, contexts, tuple(map(tuple, rows.tolist())), kv_token_s=kv_token_s), 0.0)
    factors = 1.0 + 0.2 * rng.random(33)

    def price() -> list[np.ndarray]:
        return [
            curve.verify_seconds(first, count, context_len, kv_tokens, **more)
            for first in (0, 1, 15, 60, 64, 65, 500)
            for count in (1, 2, 30, 700)
            for context_len in (0.0, 256.0, 300.5, 1024.0, 4096.0, 9999.0)
            for kv_tokens in (None, 0.0, 100.0, 1e6)
            for more in ({}, {"factors": factors})
        ]

    for ours, theirs in zip(*both(price), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("rule", [Rule.AUTO, Rule.ALGORITHM1])
@pytest.mark.parametrize("count", [*SIZES, 1500])
def test_as_many_tokens_are_admitted_of_each(both: Any, count: int, rule: Rule) -> None:
    def decide() -> list[np.ndarray]:
        rng, lengths = np.random.default_rng(count), []
        for case in range(200 if count < 50 else 20):
            caps = rng.integers(0 if case % 2 else 1, WIDTH + 1, count)
            seconds = 0.01 + np.cumsum(rng.choice([0.0, 0.0, 1e-4, 3e-3], int(caps.sum()) + 1))
            outlook = np.sort(rng.choice([rng.random(), 1.0, 0.0, 0.3], count * WIDTH))[::-1] * rng.random()
            lengths.append(
                admit(
                    Planner(rule),
                    confidence=drafts(rng, count),
                    caps=caps,
                    num_sampling=count + rng.random(),
                    step_seconds=seconds,
                    outlook=np.ascontiguousarray(outlook),
                )
            )
        return lengths

    by_c, by_numpy = both(decide)
    np.testing.assert_array_equal(np.array(by_c), np.array(by_numpy))
    assert 0 < np.mean(by_c) < WIDTH


@pytest.mark.parametrize("looks_ahead", [True, False])
@pytest.mark.parametrize("count", SIZES)
def test_the_same_is_worth_drafting(both: Any, count: int, looks_ahead: bool) -> None:
    widths = np.array([1, 2, 3, 5, WIDTH])

    def foresee() -> list[tuple[Any, ...]]:
        rng, found = np.random.default_rng(count), []
        for case in range(60 if count < 50 else 8):
            survival = np.cumprod(rng.beta(4, 1, (count, WIDTH)), axis=1) * rng.choice([0.0, 0.5, 1.0], (count, 1))
            prices = Prices(
                num_sampling=count + case % 3,
                verify_seconds=0.01 + np.cumsum(rng.choice([0.0, 1e-5, 2e-3], count * WIDTH + 1)),
                draft_seconds=np.add.outer(np.arange(count + 2), np.arange(WIDTH + 1)) * rng.random() * 1e-4,
                looks_ahead=looks_ahead,
            )
            spread = (None, np.zeros(WIDTH), rng.random(WIDTH))[case % 3]
            best = best_draft(survival, spread, prices, widths)
            found.append((best.rate, best.plain_rate, prices, best.count, best.width, best.ranking))
        return found

    for ours, theirs in zip(*both(foresee), strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-9)
        assert ours[3:5] == theirs[3:5]
        np.testing.assert_array_equal(ours[5], theirs[5])


def test_what_c_would_misread_is_refused() -> None:
    with pytest.raises(TypeError, match="doubles"):
        kernels.doubles(np.zeros(3, dtype=np.float32))
    with pytest.raises(TypeError, match="integers"):
        kernels.integers(np.zeros(3, dtype=np.int32))
    with pytest.raises(TypeError, match="single floats"):
        kernels.floats(np.zeros(3))
    with pytest.raises((TypeError, ValueError, BufferError)):
        kernels.doubles(np.zeros((3, 4))[:, ::2])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deep", "pickled"]
)
def test_a_copy_reads_and_writes_what_is_its_own(copied: Callable[[Any], Any]) -> None:
    """C knows where arrays lie, and those of a copy lie elsewhere."""
    slots, groups, caps = np.arange(3), np.array([0, 3, 6]), np.full(3, WIDTH)

    def live_on(belief: Belief, step: int) -> list[np.ndarray]:
        judgement = belief.judge(slots, groups, caps, np.full((3, WIDTH), 0.8))
        outlook = belief.outlook(judgement, slots, caps, step)
        belief.remember(judgement, caps, step)
        belief.observe(judgement, num_drafted=caps, num_verified=caps, num_accepted=np.array([0, 2, WIDTH]))
        return [judgement.believed, judgement.usual, outlook, belief.spread]

    first = Belief(3, WIDTH)
    for step in range(5):
        live_on(first, step)
    second = copied(first)
    for step in range(5, 9):
        for ours, theirs in zip(live_on(second, step), live_on(first, step), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_copied_curve_has_tables_of_its_own() -> None:
    """It read where those of the first had been, whatever lay there by then."""
    first = CostCurve(CurvePoints((1, 2, 64), (256, 1024), ((0.01, 0.02, 0.3), (0.02, 0.03, 0.5))), 0.0)
    price = first.verify_seconds(1, 80, 500.0)
    second = pickle.loads(pickle.dumps(first))
    first._verify[:] = 7.0
    np.testing.assert_array_equal(second.verify_seconds(1, 80, 500.0), price)


def test_no_other_thread_gets_in_between() -> None:
    """Beside a thread that computes in Python, a plan of 0.2 ms took 5 ms on average and 50 at times: each call let it in."""
    curve = CostCurve(CurvePoints((1, 2, 64), (256,), ((0.01, 0.02, 0.3),)), 0.0)
    ticks, over, usual_s = [0], threading.Event(), sys.getswitchinterval()

    def tick() -> None:
        while not over.is_set():
            ticks[0] += 1
            time.sleep(1e-5)

    other = threading.Thread(target=tick)
    sys.setswitchinterval(60.0)  # nobody is made to let go
    try:
        other.start()
        before = ticks[0]
        for _ in range(50):
            curve.verify_seconds(1, 300_000, 256.0)
        assert ticks[0] == before
        time.sleep(0.05)
        assert ticks[0] > before
    finally:
        sys.setswitchinterval(usual_s)
        over.set()
        other.join()


def test_a_drafter_that_states_nothing_leaves_its_rates(both: Any) -> None:
    def judge() -> np.ndarray:
        belief = Belief(3, WIDTH)
        belief.welcome(1, 2)
        slots, groups, caps = np.array([1]), np.array([0]), np.array([4])
        return belief.judge(slots, groups, caps, np.full((1, WIDTH), np.nan)).believed

    ours, theirs = both(judge)
    np.testing.assert_array_equal(ours, theirs)


def test_estimates_drift_and_spread_of_nobody_stay_as_they_are(both: Any) -> None:
    nobody, nothing = np.zeros(0, dtype=np.int64), np.zeros((0, WIDTH))

    def observe() -> list[np.ndarray]:
        estimates, drift, spread = AcceptanceEstimates(2, WIDTH), ConfidenceDrift(WIDTH), Spread(WIDTH)
        of_nobody = {"num_verified": nobody, "num_accepted": nobody}
        estimates.observe(slots=nobody, num_drafted=nobody, confidence=nothing, **of_nobody)
        drift.observe(groups=nobody, stated=nothing, believed=nothing, **of_nobody)
        spread.observe(usual=nothing, survival=nothing, caps=nobody)
        rates, usual = estimates.expected(nobody, nobody)
        return [estimates.rates(np.arange(2)), spread.share, rates, usual]

    for ours, theirs in zip(*both(observe), strict=True):
        np.testing.assert_array_equal(ours, theirs)
