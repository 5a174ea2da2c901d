"""The real scheduler on a simulated machine: a virtual clock, a cost law instead of models, acceptance traces instead of text.

Owns the order of the verbs (that of scheduler/loop.py, two cohorts in flight included) and the virtual clock. A step takes what
the law says; nothing sleeps, so minutes of serving take seconds, and every planner meets the same requests.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.core import PrefixScheduler
from scheduler.curves import CostLaw, StepWork
from scheduler.errors import Rejected, SettingsError
from scheduler.simulate_load import Load
from scheduler.simulate_report import Outcome, Recorder
from scheduler.simulate_traces import Traces
from scheduler.simulate_workers import PROMPT, STOP, SimulatedDrafter, SimulatedTarget, exact_curve, measured_curve
from scheduler.throughput import CostCurve
from scheduler.wire import Draft, Plan, Request, SamplingParams, Speculation, Verdict

_OPEN_LOOP_LIVE = 256


@dataclass(frozen=True, slots=True)
class Noise:
    """How unsteady the machine is: log-normal spread of each call, and a share of calls that take many times as long."""

    spread: float = 0.0
    outlier_share: float = 0.0
    outlier_factor: float = 10.0


@dataclass(frozen=True, slots=True)
class Jump:
    """In that step the scheduler's clock jumps by so many seconds, while the named verb runs (plan, draft or verify)."""

    step: int
    seconds: float
    verb: str = "verify"


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated. knowledge: the curve that the scheduler is given: `measured` as at a server's start, `exact`, `none`, or
    a curve itself; believed: the law that it was measured by, where that is not the true one. speculation: what requests ask for
    themselves, by request number modulo its length. text_classes: requests say what kind of text theirs is. pipeline_depth: 2
    gives the drafter a device of its own, and one cohort drafts while the other is verified, where that pays."""

    law: CostLaw
    noise: Noise = Noise()
    knowledge: str | CostCurve = "measured"
    believed: CostLaw | None = None
    variable_width: bool = True
    jumps: tuple[Jump, ...] = ()
    speculation: tuple[Speculation | None, ...] = ()
    text_classes: bool = True
    pipeline_depth: int = 1
    check_integrity: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Virtual seconds: what happens before `warm_s` is not counted, nor what comes after `warm_s + counted_s`."""

    warm_s: float
    counted_s: float

    @property
    def end_s(self) -> float:
        return self.warm_s + self.counted_s


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is being verified, until `ends_s`."""

    verdicts: list[Verdict]
    ends_s: float
    draft_s: float
    verify_s: float
    host_s: float
    plan_wall_s: float


class Simulation:
    def __init__(self, machine: Machine, planner: str, traces: Traces, load: Load, *, seed: int = 0) -> None:
        """Raises SettingsError for a planner that there is not."""
        self.machine = machine
        self.now = 0.0
        self._traces = traces
        self._load = load
        self._rng = np.random.default_rng((seed, 0x5E))
        self._jumps = {jump.step: jump for jump in machine.jumps}
        self._jumped_s = 0.0
        max_live = load.most or _OPEN_LOOP_LIVE
        self._target, self._drafter = self._workers(machine.law, max_live)
        config = SchedulerConfig(
            planner=planner,
            max_live=max_live,
            max_waiting=max(256, load.most),
            prefill_chunk=machine.law.prefill_chunk,
            prefix_cache=False,
            default_timeout_s=0.0,
            pipeline_depth=machine.pipeline_depth,
        )
        self.core = PrefixScheduler(config, self._target.info, self._drafter.info, self._curve(config))
        self._recorder = Recorder()
        self._num_steps = 0
        self._cohort = 0
        self._flight: _Flight | None = None
        self._absorbing_s = 0.0
        self._num_overlapped = 0

    def run(self, window: Window) -> Outcome:
        began = time.perf_counter()
        recorder = self._recorder = Recorder(window.warm_s)
        while self.now < window.end_s:
            self._arrive()
            if self.core.has_work:
                self._step()
            else:
                self.now = max(self.now, min(self._load.next_s(self.now), window.end_s))
        return recorder.outcome(
            planner=str(self.core.drafting.planner),
            law=self.machine.law.name,
            seconds=self.now - window.warm_s,
            wall_s=time.perf_counter() - began,
            overlapped=self._num_overlapped / max(1, self._num_steps),
        )

    def _step(self) -> None:
        """draft -> plan -> verify -> apply, or half of two such steps that overlap."""
        if self.machine.pipeline_depth > 1 and self.core.overlap_pays():
            self._overlapped_step()
            return
        self._land()
        if self.core.has_work:
            self._whole_step()

    def _whole_step(self) -> None:
        self.core.expire(self._scheduler_now)
        drafts, draft_s, wall_s = self._draft(None)
        flight = self._fly(drafts, draft_s, wall_s, self._scheduler_now + draft_s, None)
        assert flight is not None
        self.now += draft_s
        self._flight = flight
        self._land()

    def _overlapped_step(self) -> None:
        """One cohort drafts while the other one's step is verified and applied; then it is planned and sent off."""
        self._cohort = 1 - self._cohort
        began_s = self.now
        drafts, draft_s, wall_s = self._draft(self._cohort)
        self._land()
        self.now = max(self.now, began_s + draft_s)
        self.core.expire(self._scheduler_now)
        self._flight = self._fly(drafts, draft_s, wall_s, self._scheduler_now, self._cohort)
        self._num_overlapped += 1
        if self._flight is None:
            self.core.drop_plan()
            if self.core.has_work:
                self._whole_step()  # everyone belongs to the other cohort, or has just come

    def _draft(self, cohort: int | None) -> tuple[list[Draft], float, float]:
        """The drafts, the seconds they take, and the real seconds of choosing who drafts."""
        core = self.core
        began = time.perf_counter()
        call = core.choose_drafts(cohort)
        wall_s = time.perf_counter() - began
        drafts = self._drafter.drafts(call.asks, call.width)
        if call.asks:
            core.check_drafts(call, drafts)
        draft_s = self._unsteady(self._drafter.seconds(len(call.asks), call.width)) + self._absorbing_s
        self._absorbing_s = 0.0
        return drafts, draft_s, wall_s

    def _fly(
        self, drafts: list[Draft], draft_s: float, wall_s: float, now: float, cohort: int | None
    ) -> _Flight | None:
        """Plans the step and sends it off; None when there is nothing in it."""
        began = time.perf_counter()
        plan = self.core.plan(drafts, now, cohort)
        wall_s += time.perf_counter() - began
        if not plan.extensions:
            return None
        verdicts = self._target.answer(plan)
        verify_s = self._unsteady(self._target.seconds(plan))
        self._absorbing_s += self._absorb_s(plan, verdicts)
        host_s = self.machine.law.host_s(len(plan.extensions))
        ends_s = self.now + (draft_s if cohort is None else 0.0) + verify_s
        return _Flight(verdicts, ends_s, draft_s, verify_s, host_s, wall_s)

    def _land(self) -> None:
        """Waits for the step in flight, if any, and applies it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        core = self.core
        self._num_steps += 1
        self.now = max(self.now, flight.ends_s) + flight.host_s
        deltas = core.apply(flight.verdicts)
        self._report(draft=flight.draft_s, verify=flight.verify_s, plan=0.7 * flight.host_s, apply=0.3 * flight.host_s)
        assert core.last_step is not None
        timed = dataclasses.replace(core.last_step, draft_s=flight.draft_s, verify_s=flight.verify_s)
        self._recorder.step(self.now, timed, core.drafting.gate_state, deltas, flight.plan_wall_s)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._leave(int(delta.request_id))

    def _absorb_s(self, plan: Plan, verdicts: list[Verdict]) -> float:
        """Seconds that the drafter needs for the context that this step adds, before it drafts again."""
        if not plan.capture:
            return 0.0
        num_rows = sum(len(e.token_ids) - e.num_draft for e in plan.extensions) + sum(v.num_accepted for v in verdicts)
        return self.machine.law.absorb_token_s * num_rows

    @property
    def _scheduler_now(self) -> float:
        return self.now + self._jumped_s

    def _report(self, **seconds: float) -> None:
        """Hands the step's times to the scheduler as its clock saw them."""
        jump = self._jumps.get(self._num_steps)
        if jump is not None:
            seconds[jump.verb] += jump.seconds
            self._jumped_s += jump.seconds
        assert self.core.last_step is not None
        times: dict[str, Any] = {f"{verb}_s": value for verb, value in seconds.items()}
        self.core.record(dataclasses.replace(self.core.last_step, **times))
        if self.machine.check_integrity:
            self.core.check_integrity()

    def _arrive(self) -> None:
        for index in self._load.due(self.now):
            shape = self._traces.open(index)
            name = str(index)
            asked = self.machine.speculation
            request = Request(
                name,
                (PROMPT,) * shape.num_prompt,
                SamplingParams(temperature=0.0, max_tokens=self._traces.max_output, stop_ids=(STOP,)),
                speculation=asked[index % len(asked)] if asked else None,
                text_class=shape.kind if self.machine.text_classes else "",
            )
            self._target.welcome(name, shape.num_output)
            self._recorder.arrived(name, shape.kind, self.now)
            try:
                self.core.add(request, self._scheduler_now)
            except Rejected:
                self._recorder.num_refused += 1
                self._leave(index)

    def _leave(self, index: int) -> None:
        self._traces.close(index)
        self._target.forget(str(index))
        self._load.finished(index)

    def _unsteady(self, seconds: float) -> float:
        """The same draws for every planner, step by step."""
        noise = self.machine.noise
        spread, outlier = self._rng.standard_normal(), self._rng.random()
        if outlier < noise.outlier_share:
            seconds *= noise.outlier_factor
        return seconds * math.exp(noise.spread * spread)

    def _workers(self, law: CostLaw, max_live: int) -> tuple[SimulatedTarget, SimulatedDrafter]:
        target = SimulatedTarget(law, max_live=max_live, max_request_tokens=2048 + self._traces.max_output)
        return target, SimulatedDrafter(law, self._traces, target, variable_width=self.machine.variable_width)

    def _curve(self, config: SchedulerConfig) -> CostCurve | None:
        knowledge = self.machine.knowledge
        if isinstance(knowledge, CostCurve):
            return knowledge
        workers = self._workers(self.machine.believed or self.machine.law, config.max_live)
        if knowledge == "measured":
            return measured_curve(*workers, max_live=config.max_live, prefill_chunk=config.prefill_chunk)
        if knowledge == "exact":
            return exact_curve(*workers, max_live=config.max_live, prefill_chunk=config.prefill_chunk)
        if knowledge == "none":
            return None
        raise SettingsError(f"knowledge {knowledge!r} is not one of measured, exact, none")


def compare(
    machine: Machine,
    planners: Sequence[str],
    traces: Callable[[], Traces],
    load: Callable[[], Load],
    window: Window,
    *,
    seed: int = 0,
) -> dict[str, Outcome]:
    """Every planner on the same machine, requests and arrivals; by the planner's name as given."""
    return {planner: Simulation(machine, planner, traces(), load(), seed=seed).run(window) for planner in planners}


def window_of(machine: Machine, *, clients: int, warm_tokens: int = 128, counted_tokens: int = 0) -> Window:
    """As long as plain decoding needs for so many tokens of each client, by default for 8,192 of all, at least 256 of each:
    comparable effort on fast machines and slow ones."""
    counted_tokens = counted_tokens or max(256, 8192 // clients)
    step_s = machine.law.verify_s(StepWork(clients, clients, 192 * clients, 192 * clients)) + machine.law.host_s(
        clients
    )
    return Window(warm_tokens * step_s, counted_tokens * step_s)
