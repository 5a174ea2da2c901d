"""The curve follows the steps that are really run, and is not led astray by single ones or by broken clocks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.refinement import RefinedCurve, tokens_within
from scheduler.throughput import CostCurve, CurvePoints

BASE = CostCurve(
    CurvePoints(
        tokens=(1, 8, 16, 32, 64, 128, 256),
        contexts=(256,),
        verify_s=((0.014, 0.015, 0.019, 0.029, 0.057, 0.110, 0.215),),
        requests=(1, 4, 16, 32),
        widths=(1, 7),
        draft_s=((0.003, 0.005), (0.004, 0.009), (0.008, 0.026), (0.014, 0.048)),
    ),
    measured_at=0.0,
)


def run(curve: RefinedCurve, sizes: list[int], factor: float, *, steps: int = 400, draft: float = 1.0) -> None:
    rng = np.random.default_rng(1)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        noise = math.exp(0.1 * rng.standard_normal())
        curve.observe(
            num_tokens=size,
            context_len=256,
            verify_s=float(BASE.verify_seconds(size, 1, 256)[0]) * factor * noise,
            num_drafting=4,
            width=7,
            draft_s=float(BASE.draft_seconds(4, 7)) * draft * noise,
        )


def seconds(curve: RefinedCurve, size: int) -> float:
    return float(curve.verify_seconds(size, 1, 256)[0])


def test_without_news_it_is_the_measured_curve() -> None:
    curve = RefinedCurve(BASE)
    np.testing.assert_allclose(curve.verify_seconds(1, 300, 256), BASE.verify_seconds(1, 300, 256))
    np.testing.assert_allclose(curve.draft_table(8, 7), BASE.draft_table(8, 7))
    assert curve.draft_seconds(4, 7) == BASE.draft_seconds(4, 7)


@pytest.mark.parametrize("factor", [0.25, 0.7, 1.6, 4.0])
def test_a_machine_that_is_slower_or_faster_than_when_measured_is_followed(factor: float) -> None:
    curve = RefinedCurve(BASE)
    run(curve, [4, 16, 40], factor)
    for size in (4, 16, 40):
        assert seconds(curve, size) / float(BASE.verify_seconds(size, 1, 256)[0]) == pytest.approx(factor, rel=0.15)
    assert curve.verify_factor == pytest.approx(factor, rel=0.15)


def test_sizes_that_differ_differently_are_told_apart() -> None:
    curve = RefinedCurve(BASE)
    for _ in range(8):
        run(curve, [2], 1.0, steps=50)
        run(curve, [64], 2.0, steps=50)
    assert seconds(curve, 2) / 0.0141 == pytest.approx(1.0, abs=0.25)
    assert seconds(curve, 64) / 0.057 == pytest.approx(2.0, abs=0.4)


def test_seconds_never_fall_with_tokens_whatever_was_seen() -> None:
    curve = RefinedCurve(BASE)
    for _ in range(4):
        run(curve, [8], 3.0, steps=60)
        run(curve, [12], 0.4, steps=60)
    assert (np.diff(curve.verify_seconds(1, 600, 256)) >= 0).all()
    assert (np.diff(curve.draft_table(40, 7), axis=0) >= 0).all()


def test_one_pause_of_ten_seconds_moves_little() -> None:
    curve = RefinedCurve(BASE)
    before = seconds(curve, 16)
    curve.observe(num_tokens=16, context_len=256, verify_s=10.0, num_drafting=0, width=0, draft_s=0.0)
    assert seconds(curve, 16) / before < 1.04


def test_draft_costs_are_followed_too() -> None:
    curve = RefinedCurve(BASE)
    run(curve, [16], 1.0, draft=2.0)
    assert curve.draft_seconds(4, 7) == pytest.approx(0.018, rel=0.15)
    assert curve.draft_table(4, 7)[4, 7] == pytest.approx(0.018, rel=0.15)


@pytest.mark.parametrize("broken", [0.0, -3.0, math.nan, math.inf])
def test_times_of_a_clock_that_jumped_are_passed_over(broken: float) -> None:
    curve = RefinedCurve(BASE)
    curve.observe(num_tokens=16, context_len=256, verify_s=broken, num_drafting=4, width=7, draft_s=broken)
    assert seconds(curve, 16) == pytest.approx(0.019)
    assert curve.draft_seconds(4, 7) == BASE.draft_seconds(4, 7)


def test_a_prompt_chunk_is_cut_to_the_longest_step() -> None:
    curve = RefinedCurve(BASE)
    room = tokens_within(curve, seconds=0.057, num_tokens=16, most=256, context_len=256)
    assert room == 48, "64 tokens take 57 ms"
    assert tokens_within(curve, seconds=0.001, num_tokens=16, most=256, context_len=256) <= 0
    assert tokens_within(curve, seconds=9.0, num_tokens=16, most=100, context_len=256) == 100


def test_steps_that_all_take_ten_times_as_long_are_believed_sooner_than_a_single_one() -> None:
    once, always = RefinedCurve(BASE), RefinedCurve(BASE)
    run(once, [16], 1.0, steps=8)
    run(always, [16], 10.0, steps=64)
    assert seconds(always, 16) / seconds(RefinedCurve(BASE), 16) == pytest.approx(10.0, rel=0.15)
    run(once, [16], 10.0, steps=1)
    run(once, [16], 1.0, steps=7)
    assert seconds(once, 16) / seconds(RefinedCurve(BASE), 16) == pytest.approx(1.0, abs=0.05)
