"""Whether stated confidences still mean what they say, and by how much to correct them: offline calibration, re-checked online.

Owns, per text class, sampling regime and draft position, one shift of the confidence's logit, learnt from finished rounds by
stochastic gradient descent on the log loss (online Platt scaling with slope 1), and the sums of predicted and real acceptance
that show the drift. A correction is a function of c[r, k] and of the past alone, so the law stays exact. Must not know costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.admit import Lengths, Probabilities

TEXT_CLASSES = ("", "code", "math", "chat")
"""The first stands for texts of which nothing is known, and for names that are none of these."""

# A sum of gradients over one step's rounds moves a shift by this much; fewer rounds than _FULL_STEP move it in proportion.
_RATE = 0.02
_FULL_STEP = 8.0
_MOST = 3.0
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DriftRow:
    """Sums since start for one text class, by draft position: how often a draft was put to the target with its predecessors
    accepted, how often it was accepted, and the acceptances that the drafter stated and that the planner believed."""

    text_class: str
    trials: tuple[float, ...]
    accepted: tuple[float, ...]
    stated: tuple[float, ...]
    believed: tuple[float, ...]


def class_index(text_class: str) -> int:
    return TEXT_CLASSES.index(text_class) if text_class in TEXT_CLASSES else 0


class ConfidenceDrift:
    """Groups are 2 * class + (1 when greedy)."""

    def __init__(self, width: int) -> None:
        num_groups = 2 * len(TEXT_CLASSES)
        self._shift = np.zeros((num_groups, width))
        self._odds = np.ones((num_groups, width))  # exp(shift)
        # trials, accepted, stated, believed
        self._sums = np.zeros((4, num_groups, width))
        self._state = kernels.Held(self._sums, self._shift, self._odds)

    def correct(self, confidence: Probabilities, groups: npt.NDArray[np.int64]) -> Probabilities:
        """[R, at most W] confidences with the shifts of their groups [R]; NaN stays NaN."""
        if (native := kernels.load()) is not None and confidence.size:
            corrected, odds = np.empty(confidence.shape), self._odds
            told = kernels.doubles(confidence), kernels.doubles(odds), odds.shape[1], kernels.integers(groups)
            native.dspark_correct(*told, *confidence.shape, _EPS, kernels.doubles(corrected))
            return corrected
        clipped = np.minimum(np.maximum(confidence, _EPS), 1.0 - _EPS)
        odds = clipped / (1.0 - clipped) * self._odds[groups, : confidence.shape[1]]
        certain = (confidence <= 0.0) | (confidence >= 1.0)
        corrected = odds / (1.0 + odds)
        return np.where(certain, confidence, corrected) if certain.any() else corrected

    def observe(
        self,
        *,
        groups: npt.NDArray[np.int64],
        stated: Probabilities,
        believed: Probabilities,
        num_verified: Lengths,
        num_accepted: Lengths,
    ) -> None:
        """Rounds of one step, all [R] and [R, W]: what was stated and believed of each draft, and how far it got."""
        if (native := kernels.load()) is not None and stated.size:
            native.dspark_drift(
                *self._state,
                *self._odds.shape,
                kernels.integers(groups),
                len(groups),
                kernels.integers(num_verified),
                kernels.integers(num_accepted),
                kernels.doubles(stated),
                kernels.doubles(believed),
                _RATE,
                _FULL_STEP,
                _MOST,
            )
            return
        position = np.arange(stated.shape[1])
        tried = (position < num_verified[:, None]) & (position <= num_accepted[:, None]) & ~np.isnan(stated)
        if not tried.any():
            return
        values = np.zeros((4, *tried.shape))
        values[0] = tried
        values[1] = tried & (position < num_accepted[:, None])
        np.copyto(values[2], stated, where=tried)
        np.copyto(values[3], believed, where=tried)
        more = one_hot(groups, len(self._shift)) @ values
        self._sums += more
        trials, accepted, _, expected = more
        step = _RATE * (accepted - expected) / np.maximum(1.0, trials / _FULL_STEP)
        self._shift[:] = np.minimum(np.maximum(self._shift + step, -_MOST), _MOST)
        np.exp(self._shift, out=self._odds)

    def report(self) -> tuple[DriftRow, ...]:
        """One row per text class that has been seen."""
        by_class = self._sums.reshape(4, len(TEXT_CLASSES), 2, -1).sum(axis=2)
        return tuple(
            DriftRow(name, *(tuple(sums[index].tolist()) for sums in by_class))
            for index, name in enumerate(TEXT_CLASSES)
            if by_class[0, index].any()
        )


def one_hot(groups: npt.NDArray[np.int64], num_groups: int) -> Probabilities:
    """[num_groups, R] whose product with values [R, W] adds them up by group."""
    return (np.arange(num_groups)[:, None] == groups).astype(np.float64)
