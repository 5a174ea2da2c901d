"""What a simulated run showed: counted step by step, summed up once. Must not know costs or traces."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from scheduler.stats import StepStats
from scheduler.wire import Delta


class Step(NamedTuple):
    """One counted step: when it ended, requests that decoded, those that drafted and how wide, drafts verified and accepted,
    tokens that decoding got, the gate's state."""

    now: float
    num_rounds: int
    num_drafting: int
    width: int
    num_verified: int
    num_accepted: int
    num_round_tokens: int
    gate: str


@dataclass(slots=True)
class _Answer:
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    last_step: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: virtual. tokens_per_s: of the engine. user_tokens_per_s: median over answers of tokens after the first per second.

    ttft_s, tpot_s: 50th and 99th percentile over answers that began / ended in the window. accept_length: tokens per round,
    the target's own counted. budget: tokens verified per round, likewise; budget_by_load: the same by requests decoding (upper
    edges, powers of 2). gate: share of the steps in each state. longest_wait: most steps that an answer once begun had to wait
    for a token (1 is none). prediction: seconds predicted over seconds measured, draft and verify, where predicted. plan_wall_s:
    real seconds of planning a step here, median. overlapped: share of the steps in which one cohort drafted while another was
    verified. history: every counted step.
    """

    planner: str
    law: str
    seconds: float
    wall_s: float
    num_steps: int
    num_tokens: int
    num_answers: int
    num_refused: int
    tokens_per_s: float
    user_tokens_per_s: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    num_rounds: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    accept_length: float
    budget: float
    budget_by_load: dict[int, float]
    gate: dict[str, float]
    longest_wait: int
    prediction: float | None
    plan_wall_s: float
    overlapped: float
    tokens_by_kind: dict[str, int]
    history: tuple[Step, ...] = field(repr=False, default=())

    def numbers(self) -> dict[str, Any]:
        """For JSON: everything but the history, rounded."""
        return {
            "planner": self.planner,
            "curve": self.law,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "user_tokens_per_s": round(self.user_tokens_per_s, 2),
            "ttft_s_p50": round(self.ttft_s[0], 4),
            "ttft_s_p99": round(self.ttft_s[1], 4),
            "tpot_s_p50": round(self.tpot_s[0], 5),
            "tpot_s_p99": round(self.tpot_s[1], 5),
            "accept_length": round(self.accept_length, 3),
            "verify_budget": round(self.budget, 3),
            "verify_budget_by_load": {str(load): round(budget, 3) for load, budget in self.budget_by_load.items()},
            "drafted": self.num_drafted,
            "verified": self.num_verified,
            "accepted": self.num_accepted,
            "gate": {state: round(share, 4) for state, share in self.gate.items()},
            "longest_wait_steps": self.longest_wait,
            "predicted_over_measured": round(self.prediction, 4) if self.prediction is not None else None,
            "refused": self.num_refused,
            "answers": self.num_answers,
            "steps": self.num_steps,
            "seconds": round(self.seconds, 3),
            "wall_s": round(self.wall_s, 2),
            "plan_wall_ms": round(1000 * self.plan_wall_s, 3),
            "overlapped": round(self.overlapped, 4),
            "tokens_by_kind": self.tokens_by_kind,
        }


class Recorder:
    """Counts from `warm_s` on."""

    def __init__(self, warm_s: float = 0.0) -> None:
        self._warm_s = warm_s
        self._answers: dict[str, _Answer] = {}
        self._kinds: dict[str, str] = {}
        self._steps: list[Step] = []
        self._plan_wall_s: list[float] = []
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._tokens_by_kind: Counter[str] = Counter()
        self._num_emitted = self._num_drafted = self._num_steps = 0
        self._predicted_s = self._measured_s = 0.0
        self._longest_wait = 0
        self.num_refused = 0

    def arrived(self, request_id: str, kind: str, now: float) -> None:
        self._answers[request_id] = _Answer(now)
        self._kinds[request_id] = kind

    def step(self, now: float, stats: StepStats, gate: str, deltas: Sequence[Delta], plan_wall_s: float) -> None:
        """stats: with its times."""
        self._num_steps += 1
        counts = now > self._warm_s
        for delta in deltas:
            self._delta(delta, now, counts)
        if not counts:
            return
        self._num_emitted += stats.num_emitted
        self._num_drafted += stats.num_drafted
        self._plan_wall_s.append(plan_wall_s)
        if stats.predicted_s is not None:
            self._predicted_s += stats.predicted_s
            self._measured_s += stats.draft_s + stats.verify_s
        self._steps.append(
            Step(
                now,
                stats.num_rounds,
                stats.num_drafting,
                stats.width,
                stats.num_verified,
                stats.num_accepted,
                stats.num_round_tokens,
                gate,
            )
        )

    def _delta(self, delta: Delta, now: float, counts: bool) -> None:
        answer = self._answers[delta.request_id]
        if delta.token_ids:
            if not answer.num_tokens:
                answer.first_s = now
                if counts:
                    self._ttft_s.append(now - answer.arrived_s)
            elif counts:
                self._longest_wait = max(self._longest_wait, self._num_steps - answer.last_step)
            answer.num_tokens += len(delta.token_ids)
            answer.last_s, answer.last_step = now, self._num_steps
            if counts:
                self._tokens_by_kind[self._kinds[delta.request_id]] += len(delta.token_ids)
        if delta.finish_reason is not None:
            del self._answers[delta.request_id], self._kinds[delta.request_id]
            if counts and answer.num_tokens > 1:
                self._tpot_s.append((answer.last_s - answer.first_s) / (answer.num_tokens - 1))

    def outcome(self, *, planner: str, law: str, seconds: float, wall_s: float, overlapped: float = 0.0) -> Outcome:
        steps = self._steps
        num_rounds = sum(step.num_rounds for step in steps)
        num_verified = sum(step.num_verified for step in steps)
        tpot_s = _two_percentiles(self._tpot_s)
        gates = Counter(step.gate for step in steps)
        return Outcome(
            planner=planner,
            law=law,
            seconds=seconds,
            wall_s=wall_s,
            num_steps=len(steps),
            num_tokens=self._num_emitted,
            num_answers=len(self._tpot_s),
            num_refused=self.num_refused,
            tokens_per_s=self._num_emitted / seconds,
            user_tokens_per_s=1.0 / tpot_s[0] if tpot_s[0] else 0.0,
            ttft_s=_two_percentiles(self._ttft_s),
            tpot_s=tpot_s,
            num_rounds=num_rounds,
            num_drafted=self._num_drafted,
            num_verified=num_verified,
            num_accepted=sum(step.num_accepted for step in steps),
            accept_length=sum(step.num_round_tokens for step in steps) / max(1, num_rounds),
            budget=1 + num_verified / max(1, num_rounds),
            budget_by_load=budget_by_load(steps),
            gate={state: count / len(steps) for state, count in sorted(gates.items())},
            longest_wait=self._longest_wait,
            prediction=self._predicted_s / self._measured_s if self._measured_s else None,
            plan_wall_s=statistics.median(self._plan_wall_s) if self._plan_wall_s else 0.0,
            overlapped=overlapped,
            tokens_by_kind=dict(sorted(self._tokens_by_kind.items())),
            history=tuple(steps),
        )


def budget_by_load(steps: Sequence[Step]) -> dict[int, float]:
    """The verify budget by the number of requests that decoded: 1, 2, 3 to 4, 5 to 8, ... by their upper edge."""
    verified: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    for step in steps:
        if step.num_rounds:
            edge = 1 << (step.num_rounds - 1).bit_length()
            verified[edge] += step.num_verified
            rounds[edge] += step.num_rounds
    return {edge: 1 + verified[edge] / rounds[edge] for edge in sorted(rounds)}


def regrets(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """By planner: its tokens per second over those of the best fixed arm (`off` and `fixed:k`) among them; below 1 is regret."""
    best = max((o.tokens_per_s for planner, o in outcomes.items() if is_fixed(planner)), default=0.0)
    return {planner: o.tokens_per_s / best for planner, o in outcomes.items()} if best else {}


def is_fixed(planner: str) -> bool:
    return planner == "off" or planner.startswith("fixed:")


def _two_percentiles(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    middle, high = np.percentile(np.asarray(values), (50, 99))
    return float(middle), float(high)
