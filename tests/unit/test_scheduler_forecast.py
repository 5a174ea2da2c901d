"""What drafting would bring, against a slow twin that plays it out; and what confidences are worth that tell drafts apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admit import survivals
from scheduler.estimates import Spread
from scheduler.forecast import Forecast, Prices
from scheduler.gate import DraftGate

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH = 4


def prices(num_requests: int, *, token_s: float = 0.05, draft_s: float = 0.1, looks_ahead: bool = True) -> Prices:
    draft = draft_s * (0.5 + 0.1 * np.arange(num_requests + 1)[:, None]) * np.linspace(0.6, 1.0, WIDTH + 1)
    draft[0] = draft[:, 0] = 0.0
    verify = 1.0 + token_s * np.arange(num_requests * WIDTH + 1)
    return Prices(num_requests, verify, draft, looks_ahead)


def slow_rate(rows: list[list[float]], count: int, width: int, at: Prices) -> float:
    """The first `count` of these draft `width` tokens, of which the best so many are verified."""
    candidates = sorted((a for row in rows[:count] for a in row[:width] if a > 0), reverse=True)
    draft_s = at.draft_seconds[count, width]
    rates = [at.num_sampling / (at.verify_seconds[0] + draft_s)]
    for n in range(1, len(candidates) + 1):
        rate = (at.num_sampling + sum(candidates[:n])) / (at.verify_seconds[n] + draft_s)
        if not at.looks_ahead and rate <= rates[-1]:
            break
        rates.append(rate)
    return max(rates)


@settings(max_examples=80, deadline=None)
@given(
    confidence=st.lists(st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=8),
    token_s=st.sampled_from([0.0, 0.02, 0.2]),
    looks_ahead=st.booleans(),
)
def test_the_best_choice_is_that_of_trying_all_of_them(
    confidence: list[list[float]], token_s: float, looks_ahead: bool
) -> None:
    survival = survivals(confidence=np.array(confidence), caps=np.full(len(confidence), WIDTH))
    at = prices(len(confidence), token_s=token_s, looks_ahead=looks_ahead)
    forecast = Forecast(survival, None, at)
    count, width, rate = forecast.best(np.arange(1, WIDTH + 1))
    ranked = survival[forecast.ranking].tolist()
    assert rate == pytest.approx(slow_rate(ranked, count, width, at))
    best = max(slow_rate(ranked, n, w, at) for n in range(1, len(ranked) + 1) for w in range(1, WIDTH + 1))
    assert rate >= 0.99 * best, "between the numbers of requests tried first it looks again"


def test_drafts_that_can_be_told_apart_are_worth_more_than_as_many_that_are_alike() -> None:
    survival = np.full((8, 1), 0.5)
    at = Prices(8, 1.0 + 0.1 * np.arange(9), np.array([[0.0, 0.0], *[[0.0, 0.01]] * 8]), looks_ahead=True)
    alike, apart = (Forecast(survival, np.array([share]), at).best(np.array([1]))[2] for share in (0.0, 1.0))
    plain = Forecast(survival, None, at).plain_rate
    assert alike < plain, "half a token for a tenth of a step that gives 8"
    assert apart == pytest.approx((8 + 4) / (1.01 + 0.1 * 4)), "only the right ones are verified"


def test_the_spread_is_what_confidences_tell_beyond_what_was_usual() -> None:
    usual, caps = np.full((400, 2), 0.5), np.full(400, 2)
    rng = np.random.default_rng(1)
    silent, telling, half = Spread(2), Spread(2), Spread(2)
    silent.observe(usual=usual, survival=usual, caps=caps)
    telling.observe(usual=usual, survival=(rng.random((400, 2)) < 0.5).astype(float), caps=caps)
    half.observe(usual=usual, survival=np.where(rng.random((400, 2)) < 0.5, 0.25, 0.75), caps=caps)
    assert silent.share.tolist() == [0.0, 0.0]
    assert telling.share == pytest.approx([1.0, 1.0], abs=0.05)
    assert half.share == pytest.approx([0.25, 0.25], abs=0.02)
    for _ in range(8):
        telling.observe(usual=usual, survival=usual, caps=np.ones(400, dtype=np.int64))
    assert telling.share[0] < 0.01 and telling.share[1] > 0.9, "drafts of one token say nothing of the second"


def test_an_estimate_that_has_not_learned_yet_says_nothing_of_the_spread() -> None:
    spread = Spread(1)
    spread.observe(usual=np.ones((50, 1)), survival=np.full((50, 1), 0.2), caps=np.ones(50, dtype=np.int64))
    assert spread.share.tolist() == [0.0]


def _choose(gate: DraftGate, step: int, survival: np.ndarray, at: Prices):
    return gate.choose(step=step, survival=survival, idle_steps=np.arange(len(survival)), prices=at)


def test_a_probe_hears_all_who_are_left_out_where_many_cost_little_more_than_one() -> None:
    survival = np.full((8, WIDTH), 0.05)
    at = prices(8, token_s=0.2, draft_s=0.2)
    at.draft_seconds[1:, 1:] = 0.2
    choice = _choose(DraftGate(WIDTH, variable_width=True), 0, survival, at)
    assert choice.shut and len(choice.rows) == 8
    assert choice.probe == 7, "of whoever has been silent longest a token is verified whatever it is worth"
    one = _choose(DraftGate(WIDTH, variable_width=True, states=False), 0, survival, at)
    assert one.rows.tolist() == [7], "where drafts state nothing, only verified tokens teach"


def test_an_open_gate_stays_open_for_a_gain_that_would_not_open_it() -> None:
    at = Prices(1, np.array([1.0, 1.0]), np.array([[0.0, 0.0], [0.0, 0.1]]), looks_ahead=True)
    gate = DraftGate(1, variable_width=False)
    gate.next_probe = 1 << 30
    gain = {name: np.array([[1.1 * rate - 1.0]]) for name, rate in (("0.5 %", 1.005), ("1.5 %", 1.015), ("3 %", 1.03))}
    states = [
        _choose(gate, step, gain[name], at).shut
        for step, name in enumerate(("1.5 %", "0.5 %", "1.5 %", "3 %", "1.5 %"))
    ]
    assert states == [False, True, True, False, False]
