"""What single steps took and brought, and from that the speed of an arm on a machine that is disturbed.

A disturbance makes some steps long. The median of all steps of one kind hardly hears of it, so that what an arm would bring if
each of its steps took the median of its kind (`steady_speed`) tells arms apart that differ by less than two runs of one arm do.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.wire import Draft, Plan, Verdict

_ALIKE = 8


@dataclass(frozen=True, slots=True)
class Step:
    """ended: monotonic seconds; seconds: since the step before it had ended, host work included. num_tokens: that the target ran.
    num_emitted: tokens that the verdicts brought."""

    ended: float
    seconds: float
    num_tokens: int
    drafted: bool
    num_emitted: int

    @property
    def kind(self) -> tuple[bool, int]:
        """Steps of one size, above 8 tokens to within 8."""
        return self.drafted, self.num_tokens if self.num_tokens < _ALIKE else self.num_tokens // _ALIKE * _ALIKE


class StepClock:
    """Hears of drafts and verdicts from the ports that services.bench.record watches."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._last = time.monotonic()
        self._drafted = False

    def drafted(self, drafts: Sequence[Draft]) -> None:
        self._drafted = bool(drafts)

    def verified(self, plan: Plan, verdicts: Sequence[Verdict]) -> None:
        now = time.monotonic()
        emitted = sum(
            verdict.num_accepted + 1
            for extension, verdict in zip(plan.extensions, verdicts, strict=True)
            if extension.samples and verdict.error is None
        )
        self._steps.append(Step(now, now - self._last, plan.num_tokens, self._drafted, emitted))
        self._last, self._drafted = now, False

    def take(self, began: float, ended: float) -> list[Step]:
        """The steps that lie between the two moments whole; all are forgotten."""
        steps, self._steps = self._steps, []
        return [step for step in steps if began <= step.ended - step.seconds and step.ended <= ended]


def steady_speed(steps: Sequence[Step]) -> float:
    """Tokens a second if every step took the median of its kind; 0 of none."""
    seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for step in steps:
        seconds[step.kind].append(step.seconds)
    total_s = sum(len(own) * statistics.median(own) for own in seconds.values())
    return sum(step.num_emitted for step in steps) / total_s if total_s else 0.0
