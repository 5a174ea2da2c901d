"""What is known of the drafter's work: how good its drafts will be before they are made, and how good they are once they are.

Owns the estimates of acceptance, the drift of the stated confidences, the outlook and the spread, all on plain arrays with a row
(`slot`) per live request. Must not know requests, costs or planners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.admit import Lengths, Probabilities
from scheduler.drift import ConfidenceDrift, DriftRow
from scheduler.estimates import AcceptanceEstimates, Spread
from scheduler.outlook import Outlook

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Drafts of one step, all [R] or [R, width]. groups: as in ConfidenceDrift. stated: confidences as the drafter gave them,
    NaN where it gave none. filled: the same with usual rates in place of NaN. believed: corrected for drift, filled likewise.
    usual: survivals that were to be expected before."""

    slots: Indices
    groups: Indices
    stated: Probabilities
    filled: Probabilities
    believed: Probabilities
    usual: Probabilities

    @property
    def heard(self) -> Probabilities:
        """What is believed where the drafter spoke, NaN elsewhere."""
        if self.filled is self.stated:
            return self.believed
        return np.where(np.isnan(self.stated), np.nan, self.believed)


class Belief:
    def __init__(self, max_live: int, width: int) -> None:
        self.width = width
        self._estimates = AcceptanceEstimates(max_live, width)
        self._drift = ConfidenceDrift(width)
        self._outlook = Outlook(max_live, width)
        self._spread = Spread(width)

    @property
    def spread(self) -> Probabilities:
        """[width] see Spread."""
        return self._spread.share

    @property
    def drift(self) -> tuple[DriftRow, ...]:
        return self._drift.report()

    def welcome(self, slot: int, class_index: int) -> None:
        """The slot has a new owner."""
        self._estimates.reset(slot, class_index)
        self._outlook.forget(slot)

    def usual(self, slots: Indices, caps: Lengths) -> Probabilities:
        """[R, width] survivals to expect of a draft of each, by past rounds alone; 0 from caps on."""
        return self._estimates.expected(slots, caps)[1]

    def judge(self, slots: Indices, groups: Indices, caps: Lengths, stated: Probabilities) -> Judgement:
        rates, usual = self._estimates.expected(slots, caps)
        stated = np.minimum(np.maximum(stated, 0.0), 1.0)
        believed = self._drift.correct(stated, groups)
        unsaid = np.isnan(stated)
        if unsaid.any():
            filled = np.where(unsaid, rates, stated)
            return Judgement(slots, groups, stated, filled, np.where(unsaid, rates, believed), usual)
        return Judgement(slots, groups, stated, stated, believed, usual)

    def outlook(self, judgement: Judgement, rows: Indices, caps: Lengths, step: int) -> Probabilities:
        """[rows * width] survivals to expect by rank of these drafts, from what is at least two steps old."""
        return self._outlook.profile(
            judgement.slots[rows], step, caps=caps, width=self.width, otherwise=judgement.usual[rows]
        )

    def remember(self, judgement: Judgement, caps: Lengths, step: int) -> None:
        """For the outlook and the spread of later steps."""
        survival = np.cumprod(judgement.believed, axis=1, dtype=np.float64)
        self._outlook.remember(judgement.slots, step, survival)
        self._spread.observe(usual=judgement.usual, survival=survival, caps=caps)

    def pass_step(self) -> None:
        self._estimates.tick()

    def observe(
        self, judgement: Judgement, *, num_drafted: Lengths, num_verified: Lengths, num_accepted: Lengths
    ) -> None:
        """What became of the drafts, all [R]."""
        self._estimates.observe(
            slots=judgement.slots,
            num_drafted=num_drafted,
            num_verified=num_verified,
            num_accepted=num_accepted,
            confidence=judgement.heard,
        )
        self._drift.observe(
            groups=judgement.groups,
            stated=judgement.stated,
            believed=judgement.believed,
            num_verified=num_verified,
            num_accepted=num_accepted,
        )
