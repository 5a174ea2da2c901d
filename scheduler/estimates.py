"""How often drafts are accepted, as running estimates per request and position: what the gate knows before anyone drafts.

Uses finished rounds only, so nothing decided with it can anticipate a token. Must not know costs.

A request's estimate leans on that of its text class until it has evidence of its own, the class's on everyone's, and
everyone's starts at certainty: a drafter that is always right is never doubted, and one that is not is found out within a few
rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.admit import Lengths, Probabilities, survivals
from scheduler.drift import TEXT_CLASSES, one_hot

_PRIOR_TRIALS = 4.0
_CLASS_PRIOR_TRIALS = 16.0
# Long, for a gate that is shut learns little and must not have been shut by chance.
_SHARED_MEMORY = 512.0
# What a request showed fades with its own rounds, for texts change, and slowly with the steps that it sits out.
_ROUND_DECAY = 0.98
_STEP_DECAY = 0.99
_SPREAD_MEMORY = 256.0
# Nearly certain survivals say nothing of the spread, and an estimate that has not learned yet is certain.
_UNCERTAIN = 0.02


class AcceptanceEstimates:
    """P(draft k is accepted | its predecessors were) from decayed counts, trials and hits; one row (`slot`) per live request."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self._counts = np.zeros((2, num_slots, width))
        # of each text class, and last of everyone
        self._shared = np.zeros((2, len(TEXT_CLASSES) + 1, width))
        self._sizes = self._shared.shape[1], num_slots, width
        self._class_of = np.zeros(num_slots, dtype=np.int64)
        self._state = kernels.Held(self._shared, self._counts, self._class_of)

    def reset(self, slot: int, text_class: int = 0) -> None:
        """The slot has a new owner, of that index in TEXT_CLASSES."""
        self._counts[:, slot] = 0.0
        self._class_of[slot] = text_class

    def tick(self) -> None:
        """A step has passed: what requests showed counts a little less."""
        self._counts *= _STEP_DECAY

    def rates(self, slots: npt.NDArray[np.int64]) -> Probabilities:
        """[len(slots), width]"""
        shared_trials, shared_hits = self._shared
        everyone = (shared_hits[-1] + _PRIOR_TRIALS) / (shared_trials[-1] + _PRIOR_TRIALS)
        alike = (shared_hits + _CLASS_PRIOR_TRIALS * everyone) / (shared_trials + _CLASS_PRIOR_TRIALS)
        trials, hits = self._counts[:, slots]
        return (hits + _PRIOR_TRIALS * alike[self._class_of[slots]]) / (trials + _PRIOR_TRIALS)

    def expected(self, slots: npt.NDArray[np.int64], caps: Lengths) -> tuple[Probabilities, Probabilities]:
        """Rates, and the survivals of them, 0 from caps on; [R, width] both."""
        if (native := kernels.load()) is None or not len(slots):
            rates = self.rates(slots)
            return rates, survivals(confidence=rates, caps=caps)
        rates, usual = np.empty((len(slots), self.width)), np.empty((len(slots), self.width))
        native.dspark_rates(
            *self._state,
            *self._sizes,
            _PRIOR_TRIALS,
            _CLASS_PRIOR_TRIALS,
            kernels.integers(slots),
            kernels.integers(caps),
            len(slots),
            kernels.doubles(rates),
            kernels.doubles(usual),
        )
        return rates, usual

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
        if (native := kernels.load()) is not None and len(slots):
            native.dspark_learn(
                *self._state,
                *self._sizes,
                _ROUND_DECAY / _STEP_DECAY,
                _SHARED_MEMORY,
                kernels.integers(slots),
                len(slots),
                *(kernels.integers(each) for each in (num_drafted, num_verified, num_accepted)),
                kernels.doubles(confidence),
            )
            return
        position = np.arange(self.width)
        verified = position < num_verified[:, None]
        seen = verified | ((position < num_drafted[:, None]) & ~np.isnan(confidence))
        outcome = np.where(verified, position < num_accepted[:, None], np.where(seen, confidence, 0.0))
        new = np.ones((2, len(slots), self.width))
        np.cumprod(outcome[:, :-1], axis=1, out=new[0, :, 1:])
        new[0] *= seen
        np.multiply(new[0], outcome, out=new[1])
        self._counts[:, slots] = self._counts[:, slots] * (_ROUND_DECAY / _STEP_DECAY) + new
        belongs = np.ones((len(self._shared[0]), len(slots)))
        belongs[:-1] = one_hot(self._class_of[slots], len(TEXT_CLASSES))
        more = belongs @ new
        self._shared[:] = self._shared * (1.0 - 1.0 / _SHARED_MEMORY) ** more[0] + more


class Spread:
    """How far drafts turn out from what was to be expected of them: the share of a survival's uncertainty, u (1 - u) around the
    usual u, that the drafter's own confidences resolve. 0: they say nothing new; 1: they tell right from wrong.

    What can be told apart can be chosen from: a draft that is poor on average is still worth making if one knows which of its
    tokens are good. Without that the gate would price a drafter as if all drafts of a request were alike.
    """

    def __init__(self, width: int) -> None:
        self._resolved = np.zeros(width)
        self._open = np.ones(width)
        self._state = kernels.Held(self._resolved, self._open)

    @property
    def share(self) -> Probabilities:
        """[width] by draft position, from 0 to 1."""
        return np.minimum(1.0, self._resolved / np.maximum(self._open, _UNCERTAIN))

    def observe(self, *, usual: Probabilities, survival: Probabilities, caps: Lengths) -> None:
        """[R, width] survivals that were expected, and as they turned out; drafts end at caps."""
        if (native := kernels.load()) is not None and len(caps):
            told = kernels.doubles(usual), kernels.doubles(survival), kernels.integers(caps)
            native.dspark_spread(*self._state, len(self._open), *told, len(caps), _SPREAD_MEMORY, _UNCERTAIN)
            return
        counts = (np.arange(usual.shape[1]) < caps[:, None]) & (np.abs(usual - 0.5) < 0.5 - _UNCERTAIN)
        keep = (1.0 - 1.0 / _SPREAD_MEMORY) ** counts.sum(axis=0)
        self._resolved[:] = self._resolved * keep + np.where(counts, (survival - usual) ** 2, 0.0).sum(axis=0)
        self._open[:] = self._open * keep + np.where(counts, usual * (1.0 - usual), 0.0).sum(axis=0)
