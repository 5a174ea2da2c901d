"""What planning takes on this machine, in real seconds: the parts that decide, on plain arrays, with no request and no model.

Owns the arrays that a batch of so many live requests would give them. Must not know why a part takes what it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.admit import admit, parse_planner
from scheduler.belief import Belief
from scheduler.curves import CostLaw
from scheduler.forecast import Prices
from scheduler.gate import DraftGate
from scheduler.pricing import Pricing, StepLoad
from scheduler.simulate_traces import WORKLOADS, SyntheticTraces
from scheduler.simulate_workers import SimulatedDrafter, SimulatedTarget, measured_curve

_CONTEXT = 512.0
_WARM_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class PlanningCost:
    """Seconds, the least of several runs each. choose: who drafts and how wide. judge: rates, calibration, survivals. price: the
    curve at every size. outlook, admit: the planner. remember: for later steps. observe: what became of the drafts."""

    num_requests: int
    choose: float
    judge: float
    price: float
    outlook: float
    admit: float
    remember: float
    observe: float

    @property
    def plan(self) -> float:
        """From the drafts to the lengths."""
        return self.judge + self.price + self.outlook + self.admit


class Batch:
    """So many requests that all drafted, some rounds after they began."""

    def __init__(self, law: CostLaw, planner: str, num_requests: int, *, width: int = 7, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.planner = parse_planner(planner)
        self.belief = Belief(num_requests, width)
        self.pricing = Pricing(_curve(law, num_requests, width))
        self.gate = DraftGate(width, variable_width=True)
        self.load = StepLoad(num_requests, 0, _CONTEXT, num_requests * _CONTEXT)
        self.slots = np.arange(num_requests)
        self.groups = rng.integers(0, 8, num_requests)
        self.caps = np.full(num_requests, width)
        self.step = 0
        self._level = rng.beta(5, 2, (num_requests, 1))
        self._rng = rng
        for slot in range(num_requests):
            self.belief.welcome(slot, slot % 4)
        for _ in range(_WARM_ROUNDS):
            self.round(lambda _part, work: work())

    def round(self, timed: Callable[[str, Callable[[], Any]], Any]) -> np.ndarray:
        """Decides one step, each part through `timed`; the lengths."""
        self.step += 1
        width, count = self.belief.width, len(self.slots)
        stated = np.clip(self._level + 0.2 * self._rng.standard_normal((count, width)), 0.01, 0.99)
        timed("choose", lambda: self._choose(width))
        judgement = timed("judge", lambda: self.belief.judge(self.slots, self.groups, self.caps, stated))
        draft_s = self.pricing.draft_s(count, width)
        seconds = timed("price", lambda: self.pricing.step_seconds(self.load, 0, count * width + 1, draft_s=draft_s))
        outlook = timed("outlook", lambda: self.belief.outlook(judgement, self.slots, self.caps, self.step))
        lengths: np.ndarray = timed(
            "admit",
            lambda: admit(
                self.planner,
                confidence=judgement.believed,
                caps=self.caps,
                num_sampling=count,
                step_seconds=seconds,
                outlook=outlook,
            ),
        )
        timed("remember", lambda: self.belief.remember(judgement, self.caps, self.step))
        right = self._rng.random((count, width)) < self._level
        accepted = np.minimum(np.where(right.all(axis=1), width, right.argmin(axis=1)), lengths)
        self.belief.pass_step()
        timed(
            "observe",
            lambda: self.belief.observe(judgement, num_drafted=self.caps, num_verified=lengths, num_accepted=accepted),
        )
        return lengths

    def _choose(self, width: int) -> None:
        count = len(self.slots)
        verify_s = self.pricing.verify_seconds(self.load, 0, count * width + 1)
        self.gate.choose(
            step=self.step,
            survival=self.belief.usual(self.slots, self.caps),
            spread=self.belief.spread,
            idle_steps=np.zeros(count, dtype=np.int64),
            prices=Prices(
                num_sampling=count,
                verify_seconds=verify_s,
                draft_seconds=self.pricing.draft_table(count, width, verify_s=float(verify_s[0])),
                looks_ahead=True,
            ),
        )


def planning_cost(law: CostLaw, planner: str, num_requests: int, *, repeats: int = 40) -> PlanningCost:
    batch = Batch(law, planner, num_requests)
    least: dict[str, float] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        least[part] = min(least.get(part, np.inf), time.perf_counter() - began)
        return result

    for _ in range(repeats):
        batch.round(timed)
    return PlanningCost(num_requests, **least)


def _curve(law: CostLaw, num_requests: int, width: int) -> Any:
    target = SimulatedTarget(law, max_live=num_requests, max_request_tokens=4096)
    traces = SyntheticTraces(WORKLOADS["mixed"], width=width)
    drafter = SimulatedDrafter(law, traces, target, variable_width=True)
    return measured_curve(target, drafter, max_live=num_requests, prefill_chunk=law.prefill_chunk)
