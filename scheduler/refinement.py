"""The measured cost curve, kept true by the steps that are really run.

Owns factors on the curve's seconds: one level for each of the two models, and beside it a finer one by size. Must not know who
drafts or why. A machine that was busy while its curve was measured, or is busy now, is followed within some dozens of steps; a
single slow step (a pause, a collected heap) moves nothing by more than a clipped share.
"""

from __future__ import annotations

import math

import numpy as np

from scheduler.throughput import CostCurve, Seconds

# Powers of two, so that a size's place among them is its logarithm.
_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# A step that took e times as long as predicted counts as one that took 1.2 times: outliers come in both directions here.
_CLIP = 0.2
# But several in a row that are all too long, or all too short, are no outliers: the machine is another one.
_IN_A_ROW = 4
_MOST_CLIP = 1.6
_LEVEL_RATE = 0.05
_LOCAL_RATE = 0.1
_BEYOND_RATE = 0.2
_LOCAL_KEEP = 0.998
_MOST = math.log(16.0)
# Observations between two fillings of the table.
_REFILL = 8


class _Factor:
    """exp(level + what the neighbouring knots say), by size."""

    def __init__(self) -> None:
        self._level = 0.0
        self._local = [0.0] * len(_KNOTS)
        self._num_seen = 0
        self._num_alike = 0
        self.table = np.ones(_KNOTS[-1] + 1)

    def __call__(self, size: int) -> float:
        return float(self.table[min(size, _KNOTS[-1])])

    def observe(self, size: int, predicted_s: float, measured_s: float) -> None:
        """predicted_s: with the present factor."""
        raw = math.log(measured_s / predicted_s)
        if abs(raw) <= _CLIP:
            self._num_alike = 0
        else:
            sign = 1 if raw > 0.0 else -1
            self._num_alike = self._num_alike + sign if self._num_alike * sign >= 0 else sign
        clip = min(_MOST_CLIP, _CLIP * (1 + abs(self._num_alike) // _IN_A_ROW))
        error = min(_CLIP, max(-_CLIP, raw))
        # What is wrong by more than outliers are is wrong at every size, those included that nobody runs meanwhile.
        beyond = min(clip, max(-clip, raw)) - error
        self._level = min(_MOST, max(-_MOST, self._level + _LEVEL_RATE * error + _BEYOND_RATE * beyond))
        place = min(math.log2(max(1, size)), len(_KNOTS) - 1.0)
        low = min(int(place), len(_KNOTS) - 2)
        self._local[low] = _LOCAL_KEEP * self._local[low] + _LOCAL_RATE * error * (low + 1 - place)
        self._local[low + 1] = _LOCAL_KEEP * self._local[low + 1] + _LOCAL_RATE * error * (place - low)
        self._num_seen += 1
        if self._num_seen % _REFILL == 0:
            np.exp(self._level + np.interp(_LOG_SIZES, np.arange(len(_KNOTS)), self._local), out=self.table)


_LOG_SIZES = np.log2(np.maximum(1, np.arange(_KNOTS[-1] + 1)))


class RefinedCurve:
    """Looks like a CostCurve; `observe` tells it what a step took."""

    def __init__(self, base: CostCurve) -> None:
        self.base = base
        self._verify = _Factor()
        self._draft = _Factor()
        self._draft_table: tuple[int, Seconds] = (-1, np.zeros((0, 0)))
        self._num_observed = 0

    @property
    def verify_factor(self) -> float:
        """Real over measured seconds of a step of 16 tokens."""
        return self._verify(16)

    def verify_seconds(self, first: int, count: int, context_len: float, kv_tokens: float | None = None) -> Seconds:
        """[count] as CostCurve; never falling."""
        return self.base.verify_seconds(first, count, context_len, kv_tokens, factors=self._verify.table)

    def draft_seconds(self, num_requests: int, width: int) -> float:
        return float(self.base.draft_seconds(num_requests, width) * self._draft(num_requests))

    def draft_table(self, num_requests: int, width: int) -> Seconds:
        """[> num_requests, > width] as CostCurve; never falling with more requests."""
        plain = self.base.draft_table(num_requests, width)
        stamp, table = self._draft_table
        if stamp != self._num_observed or table.shape != plain.shape:
            factors = self._draft.table[np.minimum(np.arange(len(plain)), _KNOTS[-1])]
            table = np.maximum.accumulate(plain * factors[:, None], axis=0)
            self._draft_table = (self._num_observed, table)
        return table

    def observe(
        self,
        *,
        num_tokens: int,
        context_len: float,
        kv_tokens: float | None = None,
        verify_s: float,
        num_drafting: int,
        width: int,
        draft_s: float,
    ) -> None:
        """One step: tokens that the target ran and read, requests that drafted (0: nobody), and the seconds each model took.

        Times that are not positive, as a clock that was set back gives them, are passed over.
        """
        if num_tokens > 0 and 0.0 < verify_s < math.inf:
            predicted = float(self.verify_seconds(num_tokens, 1, context_len, kv_tokens)[0])
            self._verify.observe(num_tokens, predicted, verify_s)
        predicted = self.draft_seconds(num_drafting, width) if num_drafting else 0.0
        if predicted > 0.0 and 0.0 < draft_s < math.inf:
            self._draft.observe(num_drafting, predicted, draft_s)
            self._num_observed += 1


def tokens_within(
    curve: RefinedCurve,
    *,
    seconds: float,
    num_tokens: int,
    most: int,
    context_len: float,
    kv_tokens: float | None = None,
) -> int:
    """How many tokens (0 to `most`) can join a step of `num_tokens` before it takes longer than `seconds`."""
    sizes = curve.verify_seconds(num_tokens, most + 1, context_len, kv_tokens)
    return int(np.searchsorted(sizes, seconds, side="right")) - 1
