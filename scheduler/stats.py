"""What one step did and what all steps did, as plain numbers. Owns their names; must not know how they are exported.

Ratios are for the reader: every ratio worth having is two counters here (accept length = num_round_tokens / num_rounds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from scheduler.drift import DriftRow


@dataclass(frozen=True, slots=True)
class StepStats:
    """One pass through draft, plan, verify, apply.

    num_rounds: requests whose answer was already running and got its next tokens in this step, drafted or not.
    num_drafting, width: requests that were asked a draft, and its width; 0 when nobody drafted.
    verified_lengths, accepted_lengths: [num_rounds] draft tokens verified, and accepted and committed, per round.
    num_tokens: everything the target ran: prefill, last tokens and drafts.
    draft_s, verify_s: inside the models' calls. plan_s: choosing who drafts, and the plan. apply_s: committing and emitting.
    predicted_s: what the cost curve said for draft + verify; None without a curve.
    context_len: tokens before each token of the step, on average. kv_tokens: cached tokens that it read, once per request; None:
        not known. tokens_of_class: tokens that each round committed.
    """

    step: int
    num_tokens: int
    num_prefill_tokens: int
    num_rounds: int
    num_drafting: int
    width: int
    num_drafted: int
    verified_lengths: tuple[int, ...]
    accepted_lengths: tuple[int, ...]
    num_round_tokens: int
    num_emitted: int
    gate_shut: bool
    predicted_s: float | None
    context_len: float = 0.0
    kv_tokens: float | None = None
    tokens_of_class: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    draft_s: float = 0.0
    plan_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0

    @property
    def num_verified(self) -> int:
        return sum(self.verified_lengths)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_lengths)

    @property
    def host_s(self) -> float:
        return self.plan_s + self.apply_s


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since start, then gauges. `*_at[k]` counts rounds whose draft token k (0-based) was verified / accepted.

    num_drafted_tokens, num_verified_tokens, num_accepted_tokens: proposed by the drafter; admitted by the plan; accepted by
        the target and committed. num_round_tokens: tokens committed by rounds (accepted drafts and the target's own);
        num_emitted_tokens adds the first token of each answer.
    verify_budget_sum / verify_budget_count: tokens verified per request and round (drafts + the request's own one).
    rounds_of_class, round_tokens_of_class: rounds and their tokens by the requests' text class; "" is unknown.
    drift: how confidences compare with what was accepted, by text class and position.
    num_untrimmed_plans: plans that admitted every draft because there was no cost curve. verify_cost_factor: seconds of steps
        now over what the saved curve says.
    finished: by finish reason; failed: by error class; rejected: by error class, never started.
    predicted_s, measured_s: sums of draft + verify seconds over the steps that had a prediction.
    queue_s / num_admitted: seconds between arrival and first KV block. trim_off_reason: why no draft is trimmed, or "".
    kv_blocks_used: held by live requests; kv_blocks_cached: idle, kept for prefix hits; kv_blocks_total leaves out block 0.
    last_step_age_s: seconds since a step completed (0 before the first). max_request_tokens: prompt + max_tokens at most.
    """

    num_steps: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_round_tokens: int = 0
    num_emitted_tokens: int = 0
    verified_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    verify_budget_sum: int = 0
    verify_budget_count: int = 0
    num_step_tokens: int = 0
    num_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0
    queue_s: float = 0.0
    rounds_of_class: dict[str, int] = field(default_factory=dict)
    round_tokens_of_class: dict[str, int] = field(default_factory=dict)
    drift: tuple[DriftRow, ...] = ()
    finished: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    draft_s: float = 0.0
    plan_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_gate_shut_steps: int = 0
    num_gate_probes: int = 0
    num_untrimmed_plans: int = 0
    num_drafter_losses: int = 0
    num_verifier_losses: int = 0

    num_live: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    planner: str = ""
    trim_off_reason: str = ""
    gate_state: str = ""
    draft_width: int = 0
    curve_loaded: bool = False
    curve_from_file: bool = False
    curve_age_s: float = 0.0
    drafter_alive: bool = False
    verifier_alive: bool = False
    last_step_age_s: float = 0.0
    max_request_tokens: int = 0
    verify_cost_factor: float = 1.0


@dataclass(slots=True)
class Ledger:
    """The running sums behind SchedulerStats' counters. One writer: the loop's thread."""

    num_steps: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_round_tokens: int = 0
    num_emitted_tokens: int = 0
    num_step_tokens: int = 0
    num_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0
    queue_s: float = 0.0
    draft_s: float = 0.0
    plan_s: float = 0.0
    verify_s: float = 0.0
    apply_s: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    num_gate_shut_steps: int = 0
    num_gate_probes: int = 0
    num_untrimmed_plans: int = 0
    num_drafter_losses: int = 0
    num_verifier_losses: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    rounds_of_class: Counter[str] = field(default_factory=Counter)
    round_tokens_of_class: Counter[str] = field(default_factory=Counter)
    verified_lengths: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)

    def record(self, step: StepStats) -> None:
        self.num_steps += 1
        self.num_rounds += step.num_rounds
        self.num_drafted_tokens += step.num_drafted
        self.num_round_tokens += step.num_round_tokens
        self.num_emitted_tokens += step.num_emitted
        self.num_step_tokens += step.num_tokens
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_gate_shut_steps += step.gate_shut
        for name, counts in step.tokens_of_class.items():
            self.rounds_of_class[name] += len(counts)
            self.round_tokens_of_class[name] += sum(counts)
        self.verified_lengths.update(step.verified_lengths)
        self.accepted_lengths.update(step.accepted_lengths)
        self.draft_s += step.draft_s
        self.plan_s += step.plan_s
        self.verify_s += step.verify_s
        self.apply_s += step.apply_s
        if step.predicted_s is not None:
            self.predicted_s += step.predicted_s
            self.measured_s += step.draft_s + step.verify_s

    def counters(self, width: int) -> dict[str, Any]:
        """The counter half of SchedulerStats, by field name. `width`: least number of draft positions to list."""
        num_verified = _weighted_sum(self.verified_lengths)
        num_rounds = self.verified_lengths.total()
        plain = {name: getattr(self, name) for name in _PLAIN_COUNTERS}
        return plain | {
            "num_draft_rounds": num_rounds - self.verified_lengths[0],
            "num_verified_tokens": num_verified,
            "num_accepted_tokens": _weighted_sum(self.accepted_lengths),
            "verified_at": _at_least(self.verified_lengths, width),
            "accepted_at": _at_least(self.accepted_lengths, width),
            "verify_budget_sum": num_rounds + num_verified,
            "verify_budget_count": num_rounds,
            "rounds_of_class": dict(self.rounds_of_class),
            "round_tokens_of_class": dict(self.round_tokens_of_class),
            "finished": dict(self.finished),
            "failed": dict(self.failed),
            "rejected": dict(self.rejected),
        }


# The sums that SchedulerStats repeats under the same name.
_PLAIN_COUNTERS = tuple(f.name for f in fields(Ledger) if f.default is not MISSING)


def _weighted_sum(lengths: Counter[int]) -> int:
    return sum(length * count for length, count in lengths.items())


def _at_least(lengths: Counter[int], width: int) -> tuple[int, ...]:
    """[k] = how many rounds had a length above k."""
    top = max(width, max(lengths, default=0))
    return tuple(sum(count for length, count in lengths.items() if length > k) for k in range(top))
