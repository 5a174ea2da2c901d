"""What a trace tells of one request: what the engine's deltas said of its phases and verbs, and how it ended.

Collected only for requests that are sampled. Holds numbers and words of our own, never a prompt or a text. Knows neither
OpenTelemetry nor HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from scheduler.errors import SettingsError
from scheduler.wire import Delta, Request, StepTimes

VERBS = ("draft", "plan", "verify", "apply")
# Of one answer; what comes later is in the sums alone.
MOST_ROUNDS = 32


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """endpoint: of an OTLP receiver; empty is no tracing. protocol: `http/protobuf` or `grpc`.
    ratio: of the traces that begin here; a client's own decision (traceparent) holds."""

    endpoint: str = ""
    protocol: str = "http/protobuf"
    ratio: float = 1.0


NO_TRACING = TracingConfig()


def check_tracing(config: TracingConfig) -> None:
    """Raises SettingsError where traces are wanted and the extra is not installed."""
    if config.endpoint and find_spec("opentelemetry.exporter") is None:
        raise SettingsError(
            f"tracing.endpoint is {config.endpoint} and OpenTelemetry's exporter is not installed; run "
            "`pip install 'dspark-serve[tracing]'`, or unset it (and OTEL_EXPORTER_OTLP_ENDPOINT)"
        )


@dataclass(frozen=True, slots=True)
class Round:
    """ended_s: by this process's monotonic clock, as all times here."""

    times: StepTimes
    num_tokens: int
    num_drafted: int
    num_verified: int
    num_accepted: int


@dataclass(slots=True)
class Phase:
    """Steps in a row, summed. seconds: of each verb. first: the times of the first of them."""

    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(VERBS, 0.0))
    first: StepTimes | None = None
    ended_s: float = 0.0

    def add(self, times: StepTimes) -> None:
        self.first = self.first or times
        self.num_steps += times.num_steps
        self.ended_s = times.ended_s
        for verb in VERBS:
            self.seconds[verb] += getattr(times, f"{verb}_s")


@dataclass(slots=True)
class ChoiceTrace:
    """One engine request. prefill: until its first token; decode: its verify rounds, of which the first are kept one by one.

    arrived_s: when it reached the scheduler, told by whichever delta came here fastest.
    """

    request_id: str
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    rounds: list[Round] = field(default_factory=list)
    arrived_s: float = math.inf
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    finish_reason: str = ""

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify round."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else None

    def add(self, deltas: Sequence[Delta], now: float) -> None:
        for delta in deltas:
            self.num_tokens += len(delta.token_ids)
            if delta.is_round:
                self._add_round(delta)
            if delta.times is not None:
                self.arrived_s = min(self.arrived_s, now - delta.times.ended_s)
                (self.decode if delta.is_round else self.prefill).add(delta.times)

    def _add_round(self, delta: Delta) -> None:
        self.num_rounds += 1
        self.num_round_tokens += len(delta.token_ids)
        self.num_drafted += delta.num_drafted
        self.num_verified += delta.num_verified
        self.num_accepted += delta.num_accepted
        if delta.times is not None and len(self.rounds) < MOST_ROUNDS:
            counts = (len(delta.token_ids), delta.num_drafted, delta.num_verified, delta.num_accepted)
            self.rounds.append(Round(delta.times, *counts))


@dataclass(slots=True)
class RequestTrace:
    """trace_id: 32 hex digits. requests: what the engine was asked; empty for what was refused before."""

    trace_id: str
    requests: tuple[Request, ...] = ()
    choices: list[ChoiceTrace] = field(default_factory=list)

    def begin(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.choices = [ChoiceTrace(request.request_id) for request in requests]

    def add(self, index: int, deltas: Sequence[Delta]) -> None:
        self.choices[index].add(deltas, time.monotonic())

    def end(self, finish_reasons: Sequence[str]) -> None:
        for choice, reason in zip(self.choices, finish_reasons, strict=True):
            choice.finish_reason = reason
