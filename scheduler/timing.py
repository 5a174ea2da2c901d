"""How long each verb took for the requests that want to know: sums of the steps they were in, told with their deltas.

Owns the open sums of requests with `timed`. Works on what a step already hands on (a Plan, its seconds, its Deltas), so that a
request without `timed` costs one look at an empty dict a step. Must not know what a trace is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.wire import Delta, Plan, StepTimes


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step by the scheduler's clock: when it began and ended, and the seconds of its verbs, as in StepStats."""

    began_s: float
    ended_s: float
    draft_s: float
    plan_s: float
    verify_s: float
    apply_s: float


@dataclass(slots=True)
class _Open:
    arrival_s: float
    steps: list[StepSeconds] = dataclasses.field(default_factory=list)


class Timekeeper:
    """`begin` once a request is accepted, `note` after each step, `stamp` for every delta on its way out."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request_id: str, now: float) -> None:
        self._open[request_id] = _Open(now)

    def note(self, plan: Plan, step: StepSeconds) -> None:
        """Adds the step to every timed request that had a share in it."""
        if not self._open:
            return
        for extension in plan.extensions:
            if (timed := self._open.get(extension.request_id)) is not None:
                timed.steps.append(step)

    def stamp(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """The deltas, those of timed requests with what happened since their last one. Endings close the sums."""
        if not self._open:
            return deltas
        return [self._stamped(delta) for delta in deltas]

    def _stamped(self, delta: Delta) -> Delta:
        timed = self._open.get(delta.request_id)
        if timed is None:
            return delta
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        steps, timed.steps = timed.steps, []
        return dataclasses.replace(delta, times=_sum(steps, timed.arrival_s)) if steps else delta


def _sum(steps: Sequence[StepSeconds], arrival_s: float) -> StepTimes:
    """A request that came in the middle of its first step waited for nothing."""
    return StepTimes(
        began_s=max(0.0, steps[0].began_s - arrival_s),
        ended_s=steps[-1].ended_s - arrival_s,
        num_steps=len(steps),
        draft_s=sum(step.draft_s for step in steps),
        plan_s=sum(step.plan_s for step in steps),
        verify_s=sum(step.verify_s for step in steps),
        apply_s=sum(step.apply_s for step in steps),
    )
