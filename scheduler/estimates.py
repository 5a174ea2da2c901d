"""How often drafts are accepted, as running estimates per request and position: what the gate knows before anyone drafts.

Uses finished rounds only, so nothing decided with it can anticipate a token. Must not know costs.

A request's estimate leans on the global one until it has evidence of its own, and the global one starts at certainty: a drafter
that is always right is never doubted, and one that is not is found out within a few rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.admit import Lengths, Probabilities

_PRIOR_TRIALS = 4.0
_GLOBAL_MEMORY = 128.0
_STEP_DECAY = 0.98


class AcceptanceEstimates:
    """P(draft k is accepted | its predecessors were) from decayed counts; one row (`slot`) per live request."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self._trials = np.zeros((num_slots, width))
        self._hits = np.zeros((num_slots, width))
        self._all_trials = np.zeros(width)
        self._all_hits = np.zeros(width)

    def reset(self, slot: int) -> None:
        self._trials[slot] = self._hits[slot] = 0.0

    def tick(self) -> None:
        """A step has passed: what a request showed counts a little less."""
        self._trials *= _STEP_DECAY
        self._hits *= _STEP_DECAY

    def rates(self, slots: npt.NDArray[np.int64]) -> Probabilities:
        """[len(slots), width]"""
        everyone = (self._all_hits + _PRIOR_TRIALS) / (self._all_trials + _PRIOR_TRIALS)
        return (self._hits[slots] + _PRIOR_TRIALS * everyone) / (self._trials[slots] + _PRIOR_TRIALS)

    def observe(
        self,
        *,
        slots: npt.NDArray[np.int64],
        num_drafted: Lengths,
        num_verified: Lengths,
        num_accepted: Lengths,
        confidence: Probabilities,
    ) -> None:
        """Rounds of different requests. All [R]; confidence [R, width], NaN where the drafter gave none.

        A drafted token that was not verified although its predecessors were accepted counts with its confidence; leaving it
        out would keep only the positions that looked good.
        """
        position = np.arange(self.width)
        verified = position < num_verified[:, None]
        guessed = ~verified & (position < num_drafted[:, None]) & ~np.isnan(confidence)
        outcome = np.where(verified, position < num_accepted[:, None], np.where(guessed, confidence, 0.0))
        reached = np.ones_like(outcome)
        np.cumprod(outcome[:, :-1], axis=1, out=reached[:, 1:])
        trials = reached * (verified | guessed)
        hits = trials * outcome
        self._trials[slots] += trials
        self._hits[slots] += hits
        keep = (1.0 - 1.0 / _GLOBAL_MEMORY) ** trials.sum(axis=0)
        self._all_trials = self._all_trials * keep + trials.sum(axis=0)
        self._all_hits = self._all_hits * keep + hits.sum(axis=0)
