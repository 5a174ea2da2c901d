"""How well predicted probabilities fit what happened: calibration error, ranking, squared error. Pure; numpy only.

Predictions p [N] in [0, 1], outcomes y [N] of 0 and 1 (or bool). Bins are 20 of equal width, as DeepSpec's evaluator has them;
a prediction on an edge belongs to the bin above it, 1 to the last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from drafter.rounds import Floats, Rounds

NUM_BINS = 20

Outcomes = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Bins:
    """All [20], by bin of the prediction: how many, their mean prediction, their share of successes (0 where empty)."""

    count: Floats
    predicted: Floats
    observed: Floats


def reliability_bins(predicted: Floats, happened: Outcomes) -> Bins:
    index = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    count = np.bincount(index, minlength=NUM_BINS).astype(np.float64)
    some = np.maximum(count, 1.0)
    return Bins(
        count,
        np.bincount(index, weights=predicted, minlength=NUM_BINS) / some,
        np.bincount(index, weights=happened, minlength=NUM_BINS) / some,
    )


def expected_calibration_error(predicted: Floats, happened: Outcomes) -> float:
    """Mean over predictions of |mean prediction - share of successes| of their bin; 0 of nothing."""
    bins = reliability_bins(predicted, happened)
    return float((bins.count * np.abs(bins.predicted - bins.observed)).sum() / max(1, len(predicted)))


def area_under_roc(predicted: Floats, happened: Outcomes) -> float | None:
    """P(a success was predicted higher than a failure), ties half; exact, where DeepSpec takes a histogram. None when all
    outcomes are alike."""
    happened = happened.astype(bool)
    num_hits = int(happened.sum())
    num_misses = len(happened) - num_hits
    if not num_hits or not num_misses:
        return None
    _, group, sizes = np.unique(predicted, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    rank = last - (sizes - 1) / 2.0
    return float((rank[group][happened].sum() - num_hits * (num_hits + 1) / 2.0) / (num_hits * num_misses))


def brier_score(predicted: Floats, happened: Outcomes) -> float:
    """Mean squared error; 0 of nothing."""
    return float(np.mean((predicted - happened) ** 2)) if len(predicted) else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """How prefix survival was predicted. Lists by draft position; None where no round proposed so many. ece, brier, auc: means
    over positions weighted by their counts; auc is None where no position has one."""

    counts: list[int]
    ece_at: list[float | None]
    auc_at: list[float | None]
    brier_at: list[float | None]
    ece: float
    auc: float | None
    brier: float

    def facts(self) -> dict[str, object]:
        """Rounded for a report."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value


def cumulative_survival(confidence: Floats) -> Floats:
    """[N, γ] confidences -> probability that drafts 0..k are all accepted."""
    return np.cumprod(confidence, axis=1, dtype=np.float64)


def fit_of(confidence: Floats, rounds: Rounds) -> Fit:
    """confidence [N, γ] of the rounds' drafts, against what happened to their prefixes."""
    predicted = cumulative_survival(confidence)
    counts: list[int] = []
    columns: list[tuple[float | None, float | None, float | None]] = []
    for k in range(rounds.width):
        rows = rounds.proposed > k
        p, y = predicted[rows, k], rounds.accepted[rows] > k
        counts.append(len(p))
        some = len(p) > 0
        columns.append(
            (
                expected_calibration_error(p, y) if some else None,
                area_under_roc(p, y),
                brier_score(p, y) if some else None,
            )
        )
    ece_at, auc_at, brier_at = (list(column) for column in zip(*columns, strict=True))
    return Fit(
        counts,
        ece_at,
        auc_at,
        brier_at,
        ece=_weighted(ece_at, counts) or 0.0,
        auc=_weighted(auc_at, counts),
        brier=_weighted(brier_at, counts) or 0.0,
    )


def _weighted(values: list[float | None], counts: list[int]) -> float | None:
    known = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None
