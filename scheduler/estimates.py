"""How often drafts are accepted, as running estimates per request and position: what the gate knows before anyone drafts.

Uses finished rounds only, so nothing decided with it can anticipate a token. Must not know costs.

A request's estimate leans on that of its text class until it has evidence of its own, the class's on everyone's, and
everyone's starts at certainty: a drafter that is always right is never doubted, and one that is not is found out within a few
rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.admit import Lengths, Probabilities
from scheduler.drift import TEXT_CLASSES

_PRIOR_TRIALS = 4.0
_CLASS_PRIOR_TRIALS = 16.0
_SHARED_MEMORY = 128.0
_STEP_DECAY = 0.98


class AcceptanceEstimates:
    """P(draft k is accepted | its predecessors were) from decayed counts; one row (`slot`) per live request."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self._trials = np.zeros((num_slots, width))
        self._hits = np.zeros((num_slots, width))
        self._class_of = np.zeros(num_slots, dtype=np.int64)
        self._class_trials = np.zeros((len(TEXT_CLASSES), width))
        self._class_hits = np.zeros((len(TEXT_CLASSES), width))
        self._all_trials = np.zeros(width)
        self._all_hits = np.zeros(width)

    def reset(self, slot: int, text_class: int = 0) -> None:
        """The slot has a new owner, of that index in TEXT_CLASSES."""
        self._trials[slot] = self._hits[slot] = 0.0
        self._class_of[slot] = text_class

    def tick(self) -> None:
        """A step has passed: what a request showed counts a little less."""
        self._trials *= _STEP_DECAY
        self._hits *= _STEP_DECAY

    def rates(self, slots: npt.NDArray[np.int64]) -> Probabilities:
        """[len(slots), width]"""
        everyone = (self._all_hits + _PRIOR_TRIALS) / (self._all_trials + _PRIOR_TRIALS)
        alike = (self._class_hits + _CLASS_PRIOR_TRIALS * everyone) / (self._class_trials + _CLASS_PRIOR_TRIALS)
        prior = _PRIOR_TRIALS * alike[self._class_of[slots]]
        return (self._hits[slots] + prior) / (self._trials[slots] + _PRIOR_TRIALS)

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
        by_class = np.zeros_like(self._class_trials), np.zeros_like(self._class_hits)
        np.add.at(by_class[0], self._class_of[slots], trials)
        np.add.at(by_class[1], self._class_of[slots], hits)
        self._class_trials, self._class_hits = _fading(self._class_trials, self._class_hits, *by_class)
        self._all_trials, self._all_hits = _fading(
            self._all_trials, self._all_hits, trials.sum(axis=0), hits.sum(axis=0)
        )


def _fading(
    trials: Probabilities, hits: Probabilities, new_trials: Probabilities, new_hits: Probabilities
) -> tuple[Probabilities, Probabilities]:
    keep = (1.0 - 1.0 / _SHARED_MEMORY) ** new_trials
    return trials * keep + new_trials, hits * keep + new_hits
