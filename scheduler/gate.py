"""Draft or not: which requests draft this step, and how many tokens, decided before drafting from past rounds alone.

A draft costs something whatever becomes of it, so the planner's objective is asked in advance (scheduler/forecast.py) over
(requests that draft, width). Must not know requests or blocks.

Who is shut out would never be heard of again; a probe lets them draft now and then. Probes are spaced so that they cost
about a fifth of a percent at most, and further apart while they fail. Nor would a gate that is shut, but not by far, hear what
the steps take that it forgoes: in trials those draft of whom it expects most, at the same expense.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.admit import Probabilities
from scheduler.forecast import BestDraft, Prices, best_draft
from scheduler.trust import Trust

PROBE_SHARE = 0.002
# A gain within the error of curve and estimates is as often a loss: of two percent that are forecast nothing or twice as much may
# come, and less than that is not missed. Estimates of who drafts are fresh, so what is open stays open for less than what
# would open it. How far forecasts are too good is Trust's to know.
_OPENS = 1.02
_STAYS_OPEN = 1.01
# Further from plain decoding the curve is hardly wrong enough. Trials that succeed follow each other.
_WORTH_A_TRIAL = 0.85
_LEAST_LOSS = 0.02
_NEXT_TRIAL = 8
_LONGEST_STRETCH = 4.0
_LONGEST_INTERVAL = 2048
_NO_PROBE = -1
# Widths worth telling apart, beside the full one.
_WIDTHS = (1, 2, 3, 5, 8, 12)


@dataclass(frozen=True, slots=True)
class Choice:
    """rows: indices of the candidates that draft, ascending, those included that draft only to be heard of. probe: one of the
    latter, of which at least one token is verified, or -1. shut: nobody drafts because it does not pay, but for probes and
    trials. trial: it is one, and at least one token of each is verified. promised: tokens per second that were forecast of it, 0
    where none were."""

    rows: npt.NDArray[np.int64]
    width: int
    probe: int = _NO_PROBE
    shut: bool = False
    trial: bool = False
    promised: float = 0.0


class DraftGate:
    """Holds when the next probe is due; everything else comes in as arguments. `step` is the caller's step number."""

    def __init__(self, width: int, *, variable_width: bool, states: bool = True) -> None:
        """width: most tokens per draft; variable_width: fewer may be asked for, and cost less. states: drafts carry confidences,
        so that one teaches something even where nothing of it is verified. margin: what drafting was last expected to bring over
        what plain decoding does."""
        self._width = width
        self._widths = np.array([*(w for w in _WIDTHS if variable_width and w < width), width])
        self._states = states
        self._interval = self._shortest = 1.0
        self._open = True
        self.next_probe = 0
        self._next_trial = 0
        self._trial_interval = self._shortest_trial = 1.0
        self.margin = 1.0
        self.trust = Trust()

    def choose(
        self,
        *,
        step: int,
        survival: Probabilities,
        idle_steps: npt.NDArray[np.int64],
        prices: Prices,
        spread: Probabilities | None = None,
        may_try: bool = True,
    ) -> Choice:
        """survival: [R, width] expected survival of each candidate's drafts, 0 where they cannot go. spread: [width], how far
        from that they turn out (scheduler/estimates.py).

        idle_steps: [R] steps since each drafted. may_try: the step could tell what a trial brings.
        """
        best = best_draft(survival, spread, prices, self._widths)
        self.margin = self.trust.factor * best.rate / best.plain_rate
        self._open = self.margin > (_STAYS_OPEN if self._open else _OPENS)
        if self._open:
            choice = Choice(np.sort(best.ranking[: best.count]), best.width, promised=best.rate)
        else:
            choice = Choice(best.ranking[:0], 0, shut=True)
            # the paper's rule never goes past a token that does not pay
            may_try = may_try and prices.looks_ahead and step >= self._next_trial
            if may_try and (trial := self._trial(best, step, survival, prices)):
                return trial
        if step >= self.next_probe:
            choice = self._with_probe(choice, step, survival, idle_steps, prices)
        return choice

    def probed(self, step: int, *, success: bool) -> None:
        """What a probe found: one that succeeds is soon repeated, one that fails is put off."""
        if success:
            self.next_probe = min(self.next_probe, step + 1 + int(self._shortest))
            self._interval = self._shortest
        else:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)

    def tried(self, step: int, *, success: bool) -> None:
        """What a trial found: whether drafting would pay if its steps took what this one did."""
        if success:
            self._next_trial, self._trial_interval = step + _NEXT_TRIAL, self._shortest_trial
        else:
            self._trial_interval = min(2 * self._trial_interval, _LONGEST_STRETCH * self._shortest_trial)

    def _trial(self, best: BestDraft, step: int, survival: Probabilities, prices: Prices) -> Choice | None:
        """Of a token at least for each of the best, unless that would lose too much."""
        rows = np.sort(best.ranking[: best.count])
        seconds = float(
            prices.draft_seconds[best.count, best.width]
            + prices.verify_seconds[min(best.count, len(prices.verify_seconds) - 1)]
        )
        tokens = prices.num_sampling + float(survival[rows, 0].sum())
        margin = self.trust.factor * tokens / seconds / best.plain_rate
        if margin < _WORTH_A_TRIAL:
            return None
        lost_steps = max(1.0 - margin, _LEAST_LOSS) * seconds / float(prices.verify_seconds[0])
        self._shortest_trial = min(lost_steps / PROBE_SHARE, _LONGEST_INTERVAL)
        self._trial_interval = min(
            max(self._trial_interval, self._shortest_trial), _LONGEST_STRETCH * self._shortest_trial, _LONGEST_INTERVAL
        )
        self._next_trial = step + int(self._trial_interval)
        return Choice(rows, best.width, shut=True, trial=True)

    def _with_probe(
        self,
        choice: Choice,
        step: int,
        survival: Probabilities,
        idle_steps: npt.NDArray[np.int64],
        prices: Prices,
    ) -> Choice:
        """Adds those who have not drafted for longest, or when nobody is left out the full width, if there is such a thing."""
        if len(choice.rows) == len(idle_steps) and choice.width == self._width:
            return choice
        left_out = np.delete(np.arange(len(idle_steps)), choice.rows)
        if len(left_out):
            left_out = left_out[np.argsort(-idle_steps[left_out], kind="stable")]
            count, width, more_s = self._cheapest(choice, survival[left_out], prices)
            rows, probe = np.sort(np.concatenate((choice.rows, left_out[:count]))), int(left_out[0])
        else:
            rows, width, probe = choice.rows, self._width, _NO_PROBE
            more_s = _probe_seconds(choice, 0, width, prices)
        self._shortest = min(max(1.0, float(more_s / prices.verify_seconds[0]) / PROBE_SHARE), _LONGEST_INTERVAL)
        self._interval = min(max(self._interval, self._shortest), _LONGEST_STRETCH * self._shortest, _LONGEST_INTERVAL)
        self.next_probe = step + int(self._interval)
        return Choice(rows, width, probe=probe, shut=choice.shut)

    def _cheapest(self, choice: Choice, survival: Probabilities, prices: Prices) -> tuple[int, int, float]:
        """(requests, width, seconds) of the probe that teaches most per second, of those left out, in that order.

        A draft teaches as many positions as its tokens are expected to reach.
        """
        most = len(survival) if self._states else 1
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]
        reached = np.cumsum(np.concatenate((np.ones((len(survival), 1)), survival[:, :-1]), axis=1), axis=1)
        learned = np.cumsum(reached, axis=0)
        best, found = 0.0, (1, self._width, 0.0)
        for width in (choice.width,) if choice.width else self._widths.tolist():
            for count in counts:
                more_s = _probe_seconds(choice, count, width, prices)
                if learned[count - 1, width - 1] > best * more_s:
                    best, found = learned[count - 1, width - 1] / max(more_s, 1e-9), (count, width, more_s)
        return found


def _probe_seconds(choice: Choice, count: int, width: int, prices: Prices) -> float:
    """What `count` more requests that draft `width` tokens cost: the draft, and the tokens of one of them."""
    draft_s, verify_s = prices.draft_seconds, prices.verify_seconds
    return float(
        draft_s[len(choice.rows) + count, width]
        - draft_s[len(choice.rows), choice.width]
        + verify_s[min(width, len(verify_s) - 1)]
        - verify_s[0]
    )
