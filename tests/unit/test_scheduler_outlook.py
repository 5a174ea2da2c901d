"""What the planner expects before it knows: old enough survivals, each owner's own, and estimates where there are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.outlook import LAG, Outlook

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH = 3


def profile(outlook: Outlook, slots: list[int], step: int, usual: float = 0.5, cap: int = WIDTH) -> list[float]:
    count = len(slots)
    return outlook.profile(
        np.array(slots),
        step,
        caps=np.full(count, cap),
        width=WIDTH,
        otherwise=np.full((count, WIDTH), usual),
    ).tolist()


def test_nothing_newer_than_two_steps_is_read() -> None:
    outlook = Outlook(2, WIDTH)
    for step in range(10, 13):
        outlook.remember(np.array([0]), step, np.full((1, WIDTH), step / 100))
    assert LAG == 2
    assert profile(outlook, [0], 12)[0] == pytest.approx((0.10 + 3 * 0.5) / 4), "of 12, 11 and 10 only 10 is old enough"
    assert profile(outlook, [0], 14) == pytest.approx([(0.12 + 0.11 + 0.10 + 0.5) / 4] * WIDTH)


def test_what_is_very_old_is_forgotten() -> None:
    outlook = Outlook(1, WIDTH)
    outlook.remember(np.array([0]), 1, np.full((1, WIDTH), 0.9))
    assert profile(outlook, [0], 100) == [0.5] * WIDTH


def test_a_new_owner_of_a_slot_inherits_nothing() -> None:
    outlook = Outlook(1, WIDTH)
    outlook.remember(np.array([0]), 1, np.full((1, WIDTH), 0.9))
    outlook.forget(0)
    assert profile(outlook, [0], 3) == [0.5] * WIDTH


def test_requests_that_join_in_the_gap_are_expected_to_be_usual_and_those_that_left_count_no_more() -> None:
    outlook = Outlook(70, WIDTH)
    outlook.remember(np.arange(66), 5, np.full((66, WIDTH), 0.9))
    mixed = outlook.profile(
        np.arange(60, 70), 7, caps=np.full(10, WIDTH), width=WIDTH, otherwise=np.full((10, WIDTH), 0.2)
    )
    assert len(mixed) == 10 * WIDTH
    # ten requests read two samples each; of the six that were there one is remembered and one is filled in
    assert mixed.mean() == pytest.approx((6 * (0.9 + 0.2) / 2 + 4 * 0.2) / 10)


def test_caps_and_nan_leave_zero() -> None:
    outlook = Outlook(1, WIDTH)
    outlook.remember(np.array([0]), 1, np.array([[0.9, np.nan, np.nan]]))
    assert profile(outlook, [0], 3, usual=0.0)[1:] == [0.0, 0.0]
    assert profile(outlook, [0], 3, cap=1)[1:] == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=80),
    seed=st.integers(0, 99),
)
def test_a_profile_is_the_mean_of_sorted_snapshots(rows: list[list[float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = len(rows)
    history = [np.array(rows) * rng.random((count, WIDTH)) for _ in range(4)]
    outlook = Outlook(count, WIDTH)
    for step, survival in enumerate(history, start=2):
        outlook.remember(np.arange(count), step, survival)
    got = outlook.profile(
        np.arange(count), 7, caps=np.full(count, WIDTH), width=WIDTH, otherwise=np.zeros((count, WIDTH))
    )
    num_samples = 4 if count <= 8 else 2 if count <= 64 else 1
    newest = [history[3 - age] for age in range(num_samples)]
    slow = np.mean([sorted(survival.ravel(), reverse=True) for survival in newest], axis=0)
    np.testing.assert_allclose(got, slow, atol=1e-6)


@pytest.mark.parametrize("count", [2048, 4096, 5001])
def test_of_thousands_of_requests_some_stand_for_all(count: int) -> None:
    survival = np.cumprod(np.random.default_rng(2).random((count, WIDTH)), axis=1)
    outlook = Outlook(count, WIDTH)
    outlook.remember(np.arange(count), 1, survival)
    got = outlook.profile(
        np.arange(count), 3, caps=np.full(count, WIDTH), width=WIDTH, otherwise=np.zeros_like(survival)
    )
    assert len(got) == count * WIDTH and np.all(np.diff(got) <= 0.0)
    np.testing.assert_allclose(got, np.sort(survival.ravel())[::-1], atol=0.04)
