"""Calibration error, ranking and Brier score against slow obvious twins."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.reliability import (
    area_under_roc,
    brier_score,
    cumulative_survival,
    expected_calibration_error,
    fit_of,
    reliability_bins,
)
from drafter.rounds import Round, tabulate


def slow_error(predicted, happened) -> float:
    total = 0.0
    for index in range(20):
        low, high = index / 20, (index + 1) / 20
        inside = [
            (p, y) for p, y in zip(predicted, happened, strict=True) if low <= p < high or (index == 19 and p == 1.0)
        ]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(y for _, y in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(gap)
    return total


def slow_area(predicted, happened) -> float:
    hits = [p for p, y in zip(predicted, happened, strict=True) if y]
    misses = [p for p, y in zip(predicted, happened, strict=True) if not y]
    wins = sum(1.0 if hit > miss else 0.5 if hit == miss else 0.0 for hit in hits for miss in misses)
    return wins / (len(hits) * len(misses))


@pytest.fixture(params=range(4))
def sample(request) -> tuple[np.ndarray, np.ndarray]:
    """With ties, certainties and bin edges among them."""
    random = np.random.default_rng(request.param)
    predicted = np.concatenate([random.random(150), np.round(random.random(60), 1), [0.0, 1.0, 0.05, 0.5]])
    return predicted, random.random(len(predicted)) < predicted**2


def test_calibration_error_equals_the_slow_one(sample):
    predicted, happened = sample
    # i / 20 and 20 p round differently on an edge; half a bin off the edges they must agree
    off_edges = np.abs(predicted * 20 - np.round(predicted * 20)) > 1e-9
    p, y = predicted[off_edges], happened[off_edges]
    assert expected_calibration_error(p, y) == pytest.approx(slow_error(p, y), abs=1e-12)


def test_area_under_roc_counts_pairs(sample):
    predicted, happened = sample
    assert area_under_roc(predicted, happened) == pytest.approx(slow_area(predicted, happened), abs=1e-12)


def test_brier_score_is_the_mean_squared_error(sample):
    predicted, happened = sample
    slow = sum((p - y) ** 2 for p, y in zip(predicted, happened, strict=True)) / len(predicted)
    assert brier_score(predicted, happened) == pytest.approx(slow, abs=1e-12)


def test_numbers_by_hand():
    predicted = np.array([0.91, 0.93, 0.12, 0.14, 1.0])
    happened = np.array([True, False, False, False, True])
    # bins [0.9, 0.95): 0.92 against 0.5; [0.1, 0.15): 0.13 against 0; the last: right
    assert expected_calibration_error(predicted, happened) == pytest.approx((2 * 0.42 + 2 * 0.13) / 5)
    assert area_under_roc(predicted, happened) == 5 / 6
    bins = reliability_bins(predicted, happened)
    assert bins.count[[2, 18, 19]].tolist() == [2, 2, 1] and bins.count.sum() == 5
    assert bins.predicted[18] == pytest.approx(0.92) and bins.observed[18] == 0.5


def test_without_both_outcomes_there_is_no_ranking_and_without_data_no_error():
    assert area_under_roc(np.array([0.1, 0.9]), np.array([True, True])) is None
    assert area_under_roc(np.zeros(0), np.zeros(0, dtype=bool)) is None
    assert (
        expected_calibration_error(np.zeros(0), np.zeros(0, dtype=bool)) == 0.0 == brier_score(np.zeros(0), np.zeros(0))
    )


def test_a_perfect_forecast_has_no_error_and_a_reversed_one_ranks_at_zero():
    happened = np.array([True, False, True])
    assert expected_calibration_error(happened.astype(float), happened) == 0.0
    assert area_under_roc(1.0 - happened, happened) == 0.0


def test_survival_is_judged_position_by_position_on_the_rounds_that_proposed_it():
    random = np.random.default_rng(3)
    answers = []
    for _ in range(200):
        width = int(random.integers(1, 4))
        num_accepted = int(random.integers(0, width + 1))
        logits = random.normal(size=width).tolist()
        answers.append([Round(logits, width, width, tuple(range(10, 11 + num_accepted)))])
    rounds = tabulate(answers, 3, ())
    confidence = 1 / (1 + np.exp(-rounds.logits))
    found = fit_of(confidence, rounds)
    errors, counts = [], []
    for k in range(3):
        pairs = [
            (float(np.prod(confidence[row, : k + 1])), bool(rounds.accepted[row] > k))
            for row in range(len(rounds))
            if rounds.proposed[row] > k
        ]
        errors.append(slow_error(*zip(*pairs, strict=True)))
        counts.append(len(pairs))
    assert found.counts == counts and found.ece_at == pytest.approx(errors)
    assert found.ece == pytest.approx(np.average(errors, weights=counts))
    assert (np.diff(cumulative_survival(confidence[rounds.proposed == 3]), axis=1) <= 0).all()


def test_positions_that_nobody_proposed_are_unknown_not_zero():
    rounds = tabulate([[Round([0.2], 1, 1, (5,))]], 2, ())
    found = fit_of(np.array([[0.7, np.nan]]), rounds)
    assert found.ece_at == [pytest.approx(0.7), None] and found.auc is None and found.ece == pytest.approx(0.7)
    assert found.facts()["ece_at"] == [0.7, None]
