"""What the planner may expect of drafts before they are made: the survivals that each request's drafts had lately.

Owns a short memory of survivals per live request and the profile that `auto` prices ranks with. Must not know requests or
costs. Only entries at least two steps old are read: on a device that runs a step ahead of its host nothing newer is there
when a step is sized (reference 1.10), and a step of one's own tokens must never be sized by them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.admit import Lengths, Probabilities

LAG = 2
_DEPTH = 6
_NEVER = np.iinfo(np.int64).min
# Few requests: several past drafts of each stand for the spread that one would hide. Many requests show it themselves.
_SAMPLES_OF = ((8, 4), (64, 2))
# Of more requests than twice this some stand for the others: a profile of thousands is smooth.
_MOST_READ = 1024


class Outlook:
    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self._rows = np.zeros((num_slots, _DEPTH, width), dtype=np.float32)
        self._steps = np.full((num_slots, _DEPTH), _NEVER, dtype=np.int64)
        self._state = kernels.Held(self._rows, self._steps)

    def forget(self, slot: int) -> None:
        """The slot has a new owner."""
        self._steps[slot] = _NEVER

    def remember(self, slots: npt.NDArray[np.int64], step: int, survival: Probabilities) -> None:
        """survival: [R, w <= width] of the drafts made for these slots in `step`; NaN counts as 0."""
        if (native := kernels.load()) is not None and survival.size:
            told = kernels.integers(slots), len(slots), step, kernels.doubles(survival), survival.shape[1]
            native.dspark_remember(*self._state, _DEPTH, self.width, *told)
            return
        place = step % _DEPTH
        clean = np.fmax(survival, 0.0)
        self._rows[slots, place, : clean.shape[1]] = clean
        self._rows[slots, place, clean.shape[1] :] = 0.0
        self._steps[slots, place] = step

    def profile(
        self, slots: npt.NDArray[np.int64], step: int, *, caps: Lengths, width: int, otherwise: Probabilities
    ) -> Probabilities:
        """[R * width] survivals to expect by rank, descending, when these slots draft `width` tokens in `step`.

        caps: [R] tokens beyond which a draft cannot go. otherwise: [R, width] stands for what is not remembered.
        """
        if (stride := len(slots) // _MOST_READ) > 1:
            few_slots, few_caps, few = slots[::stride].copy(), caps[::stride].copy(), otherwise[::stride].copy()
            some = self.profile(few_slots, step, caps=few_caps, width=width, otherwise=few)
            return np.repeat(some, stride)[: len(slots) * width]
        num_samples = next((n for most, n in _SAMPLES_OF if len(slots) <= most), 1)
        if (native := kernels.load()) is not None and otherwise.size:
            profile = np.empty(len(slots) * width)
            native.dspark_profile(
                *self._state,
                _DEPTH,
                self.width,
                LAG,
                kernels.integers(slots),
                len(slots),
                step,
                kernels.integers(caps),
                width,
                kernels.doubles(otherwise),
                num_samples,
                kernels.doubles(profile),
            )
            return profile
        places = (step - LAG - np.arange(_DEPTH - LAG)) % _DEPTH
        steps = self._steps[slots][:, places]
        known = (steps <= step - LAG) & (steps > step - _DEPTH)
        if known[:, :num_samples].all():
            rows = self._rows[slots[:, None], places[:num_samples], :width]
        else:
            # newest first; what is missing comes last and is filled in
            newest = known.argmax(axis=1)[:, None] if num_samples == 1 else np.argsort(~known, axis=1, kind="stable")
            newest = newest[:, :num_samples]
            rows = self._rows[slots[:, None], places[newest], :width]
            have = known[np.arange(len(slots))[:, None], newest]
            rows = np.where(have[:, :, None], rows, otherwise[:, None, :].astype(np.float32))
        if int(caps.min(initial=width)) < width:
            rows = rows * (np.arange(width) < caps[:, None, None])
        ranked = np.sort(rows.transpose(1, 0, 2).reshape(num_samples, -1), axis=1)[:, ::-1]
        return ranked.mean(axis=0, dtype=np.float64)
