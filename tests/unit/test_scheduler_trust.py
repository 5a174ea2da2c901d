"""A forecast that is too good is found out, one that is not is left alone, and what was too good gets another chance."""

from __future__ import annotations

import math
import random

import pytest

from scheduler.trust import Trust


def told(ratio: float, steps: int = 400, spread: float = 0.0) -> Trust:
    trust, rng = Trust(), random.Random(1)
    for _ in range(steps):
        trust.observe(promised=100.0, came=100.0 * ratio * (1.0 + spread * rng.uniform(-1.0, 1.0)), num_rounds=16)
    return trust


def test_nothing_is_held_against_a_forecast_before_it_was_seen_to_fail() -> None:
    assert Trust().factor == 1.0


@pytest.mark.parametrize("ratio", [0.85, 1.0, 1.1])
def test_it_settles_at_what_steps_bring_of_what_was_promised(ratio: float) -> None:
    assert told(ratio).factor == pytest.approx(ratio, abs=0.01)
    assert told(ratio, steps=4000, spread=0.6).factor == pytest.approx(ratio, abs=0.08)


def test_a_forecast_that_is_right_on_average_is_trusted_however_much_single_steps_differ() -> None:
    trust = Trust()
    for _ in range(300):
        for came in (40.0, 40.0, 40.0, 280.0):
            trust.observe(promised=100.0, came=came, num_rounds=16)
    assert trust.factor == pytest.approx(1.0, abs=0.05)


def test_a_step_of_few_requests_says_less() -> None:
    few, many = Trust(), Trust()
    for _ in range(16):
        few.observe(promised=100.0, came=80.0, num_rounds=1)
    many.observe(promised=100.0, came=80.0, num_rounds=16)
    assert few.factor == pytest.approx(many.factor, abs=1e-3)
    assert many.factor < 1.0
    many.observe(promised=100.0, came=90.0, num_rounds=100_000)
    assert many.factor == pytest.approx(0.9), "and one of very many says it all"


def test_it_never_counts_a_forecast_as_worth_nothing_or_any_price() -> None:
    assert told(0.01).factor == pytest.approx(0.8)
    assert told(50.0).factor == pytest.approx(1.25)


def test_what_failed_is_given_another_chance_after_some_rest() -> None:
    trust = told(0.8)
    for _ in range(2048):
        trust.rest()
    assert trust.factor == pytest.approx(1.0 - 0.2 / math.e, abs=0.01)


def test_after_a_rest_a_few_steps_show_that_nothing_has_changed() -> None:
    rested, busy = told(0.8), told(1.0)
    for _ in range(8192):
        rested.rest()
    assert rested.factor > 0.99
    for trust in (rested, busy):
        for _ in range(8):
            trust.observe(promised=100.0, came=80.0, num_rounds=16)
    assert rested.factor < 0.91
    assert busy.factor > 0.97


@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan, math.inf])
def test_times_of_a_clock_that_jumped_teach_nothing(broken: float) -> None:
    trust = Trust()
    trust.observe(promised=broken, came=10.0, num_rounds=16)
    trust.observe(promised=10.0, came=broken, num_rounds=16)
    assert trust.factor == 1.0
