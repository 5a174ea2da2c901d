"""Draft or not: which requests draft this step, and how many tokens, decided before drafting from past rounds alone.

A draft costs something whatever becomes of it, so the planner's objective is asked in advance: expected tokens per second over
(requests that draft, width), with estimated survivals cut as the planner would cut them. Must not know requests or blocks.

Who is shut out would never be heard of again; a probe lets one of them draft now and then. Probes are spaced so that they cost
about half a percent at most, and further apart while they fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.admit import Lengths, Probabilities, Seconds

PROBE_SHARE = 0.005
# Curve and estimates err by some percent; a gain within their error is as often a loss. (Chat prompts at 4 requests lost 13 %.)
_WORTHWHILE = 1.05
_LONGEST_STRETCH = 4.0
_LONGEST_INTERVAL = 2048
_NO_PROBE = -1
# Widths worth telling apart, beside the full one.
_WIDTHS = (1, 2, 3, 5, 8, 12)
# More requests than this are weighed in as many groups of neighbours in the ranking.
_MOST_GROUPS = 64


@dataclass(frozen=True, slots=True)
class Prices:
    """num_sampling: requests that get a token this step. verify_seconds: [R * width + 1] seconds of the step with that many
    draft tokens. draft_seconds: [> R, > width] seconds of a draft, by table; row 0 is what is drafted anyway.
    looks_ahead: the planner finds the optimum past a dip of the throughput; Algorithm 1 stops before it."""

    num_sampling: float
    verify_seconds: Seconds
    draft_seconds: Seconds
    looks_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """rows: indices of the candidates that draft, ascending. probe: the row among the candidates that drafts only to be
    heard of, or -1. shut: nobody drafts because it does not pay."""

    rows: npt.NDArray[np.int64]
    width: int
    probe: int = _NO_PROBE
    shut: bool = False


class DraftGate:
    """Holds when the next probe is due; everything else comes in as arguments. `step` is the caller's step number."""

    def __init__(self, width: int, *, variable_width: bool) -> None:
        """width: most tokens per draft; variable_width: fewer may be asked for, and cost less."""
        self._width = width
        self._widths = np.array([*(w for w in _WIDTHS if variable_width and w < width), width])
        self._interval = 1.0
        self.next_probe = 0

    def choose(
        self, *, step: int, survival: Probabilities, idle_steps: npt.NDArray[np.int64], prices: Prices
    ) -> Choice:
        """survival: [R, width] expected survival of each candidate's drafts, 0 where they cannot go.

        idle_steps: [R] steps since each drafted.
        """
        ranking = np.argsort(-survival.sum(axis=1), kind="stable")
        groups = _groups(len(ranking))
        counts, widths = self._options(len(groups) - 1)
        rates = _throughput(survival[ranking], groups, counts, widths, prices)
        best = int(rates.argmax())
        plain_s = prices.verify_seconds[0] + prices.draft_seconds[0, 0]
        if rates[best] > _WORTHWHILE * prices.num_sampling / plain_s:
            rows, width = np.sort(ranking[: groups[counts[best]]]), int(widths[best])
        else:
            rows, width = ranking[:0], 0
        choice = Choice(rows, width, shut=width == 0)
        if step >= self.next_probe:
            choice = self._with_probe(choice, step, idle_steps, prices)
        return choice

    def probed(self, step: int, *, success: bool) -> None:
        """What a probe found: one that succeeds is soon repeated, one that fails is put off."""
        if success:
            self.next_probe = min(self.next_probe, step + 1 + int(self._interval) // 3)
            self._interval = max(1.0, self._interval / 2)
        else:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)

    def _options(self, num_groups: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All pairs of (how many groups draft, how wide): 1, 2, 4 ... and everyone."""
        counts = [1 << i for i in range((num_groups - 1).bit_length())] + [num_groups]
        return np.repeat(counts, len(self._widths)), np.tile(self._widths, len(counts))

    def _with_probe(
        self,
        choice: Choice,
        step: int,
        idle_steps: npt.NDArray[np.int64],
        prices: Prices,
    ) -> Choice:
        """Adds whoever has not drafted for longest, or when nobody is left out the full width, if there is such a thing."""
        if len(choice.rows) == len(idle_steps) and choice.width == self._width:
            return choice
        left_out = np.setdiff1d(np.arange(len(idle_steps)), choice.rows)
        width = choice.width if len(left_out) and choice.width else self._width
        probe = int(left_out[idle_steps[left_out].argmax()]) if len(left_out) else _NO_PROBE
        rows = np.sort(np.append(choice.rows, probe)) if len(left_out) else choice.rows
        verify_seconds, draft_seconds = prices.verify_seconds, prices.draft_seconds
        more_s = (
            draft_seconds[len(rows), width]
            - draft_seconds[len(choice.rows), choice.width]
            + verify_seconds[min(width, len(verify_seconds) - 1)]
            - verify_seconds[0]
        )
        shortest = max(1.0, float(more_s / verify_seconds[0]) / PROBE_SHARE)
        self._interval = min(max(self._interval, shortest), _LONGEST_STRETCH * shortest, _LONGEST_INTERVAL)
        self.next_probe = step + int(self._interval)
        return Choice(rows, width, probe=probe, shut=choice.shut)


def _groups(num_requests: int) -> npt.NDArray[np.int64]:
    """[G + 1] ascending from 0 to num_requests: the ranking's neighbours from one to the next count as one, many times."""
    return np.linspace(0, num_requests, min(num_requests, _MOST_GROUPS) + 1).astype(np.int64)


def _throughput(
    survival: Probabilities, groups: Lengths, counts: Lengths, widths: Lengths, prices: Prices
) -> npt.NDArray[np.float64]:
    """[C] expected tokens per second when the first counts[c] groups draft widths[c] tokens, cut as the planner cuts.

    survival: [R, width] by rank.
    """
    sizes = np.diff(groups)
    means = np.add.reduceat(survival, groups[:-1], axis=0) / sizes[:, None]
    num_rows, max_width = means.shape
    by_position = means.T.ravel()
    order = np.argsort(-by_position, kind="stable")
    drafted = (order % num_rows < counts[:, None]) & (order // num_rows < widths[:, None])
    drafted &= by_position[order] > 0.0
    members = sizes[order % num_rows] * drafted
    tokens = prices.num_sampling + np.cumsum(by_position[order] * members, axis=1)
    num_verified = np.cumsum(members, axis=1)
    base_s = prices.draft_seconds[groups[counts], widths][:, None]
    rate = tokens / (prices.verify_seconds[num_verified] + base_s)
    before = np.concatenate((prices.num_sampling / (prices.verify_seconds[0] + base_s), rate[:, :-1]), axis=1)
    if prices.looks_ahead:
        best: npt.NDArray[np.float64] = np.maximum(before[:, 0], rate.max(axis=1))
        return best
    stops = drafted & (rate <= before)
    first_stop = np.where(stops.any(axis=1), stops.argmax(axis=1), num_rows * max_width)
    path = np.concatenate((before[:, :1], rate), axis=1)
    return path[np.arange(len(counts)), first_stop]
