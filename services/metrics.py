"""The catalogue of metrics and its one exporter: the only file that knows Prometheus.

Speculation, scheduling and cache numbers are cumulative sums kept by the scheduler; a gateway pulls a snapshot at
scrape time and renders it, so every replica shows the same exact sums (Ray's exporter would send histogram midpoints).
Latency histograms and request counts are of the gateway replica that measured them. Ratios are for the reader: each is
two counters, e.g. mean accept length = 1 + accepted_tokens_total / verify_rounds_total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.stats import SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
disable_created_metrics()  # a second series for each counter, which nothing here reads

Kind = Literal["counter", "gauge", "histogram"]
Samples = Mapping[tuple[str, ...], float]

# OpenTelemetry's buckets for the GenAI metrics; below 10 ms finer ones, where speculation puts the time per token.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0)
PER_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_S = tuple(0.01 * 2**power for power in range(17))


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric family. Counters are named without `_total`, which the exporter adds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StatsSpec(Spec):
    """A family read from a snapshot. `read` gives label values -> number."""

    read: Callable[[SchedulerStats], Samples] = lambda stats: {}


def _counter(name: str, text: str, field: str) -> StatsSpec:
    return StatsSpec(name, "counter", text, read=lambda stats: {(): getattr(stats, field)})


def _gauge(name: str, text: str, field: str) -> StatsSpec:
    return StatsSpec(name, "gauge", text, read=lambda stats: {(): float(getattr(stats, field))})


def _by_label(name: str, text: str, label: str, field: str) -> StatsSpec:
    return StatsSpec(
        name, "counter", text, (label,), read=lambda stats: {(key,): n for key, n in getattr(stats, field).items()}
    )


def _by_position(name: str, text: str, field: str) -> StatsSpec:
    return StatsSpec(
        name,
        "counter",
        text,
        ("position",),
        read=lambda stats: {(str(k),): n for k, n in enumerate(getattr(stats, field))},
    )


def _verbs(stats: SchedulerStats) -> Samples:
    return {(verb,): getattr(stats, f"{verb}_s") for verb in ("draft", "plan", "verify", "apply")}


def _trim_off(stats: SchedulerStats) -> Samples:
    return {(stats.trim_off_reason,): 1.0} if stats.trim_off_reason else {}


def _planner(stats: SchedulerStats) -> Samples:
    return {(stats.planner,): 1.0}


def _of_class(name: str, text: str, field: str) -> StatsSpec:
    return StatsSpec(
        name,
        "counter",
        text,
        ("text_class",),
        read=lambda stats: {(key or "unknown",): n for key, n in getattr(stats, field).items()},
    )


def _confidence(name: str, text: str, field: str) -> StatsSpec:
    """By text class and draft position; of drafts put to the target after all their predecessors were accepted."""
    return StatsSpec(
        name,
        "counter",
        text,
        ("text_class", "position"),
        read=lambda stats: {
            (row.text_class or "unknown", str(k)): n for row in stats.drift for k, n in enumerate(getattr(row, field))
        },
    )


def _gate(stats: SchedulerStats) -> Samples:
    return {(stats.gate_state,): 1.0}


def _kv_ratio(stats: SchedulerStats) -> Samples:
    return {(): stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0}


SCHEDULER: tuple[StatsSpec, ...] = (
    _counter("dspark_steps", "Steps of the scheduler's loop.", "num_steps"),
    _counter("dspark_verify_rounds", "Verify rounds: a running request got its next tokens.", "num_rounds"),
    _counter("dspark_draft_rounds", "Verify rounds with at least one drafted token verified.", "num_draft_rounds"),
    _counter("dspark_draft_tokens", "Tokens proposed by the drafter.", "num_drafted_tokens"),
    _counter("dspark_verify_tokens", "Drafted tokens that the plan admitted to the target.", "num_verified_tokens"),
    _counter("dspark_accepted_tokens", "Drafted tokens accepted by the target and committed.", "num_accepted_tokens"),
    _counter("dspark_round_tokens", "Tokens committed by verify rounds.", "num_round_tokens"),
    _counter("dspark_emitted_tokens", "Tokens committed, first tokens included.", "num_emitted_tokens"),
    _by_position("dspark_verify_tokens_per_pos", "Rounds that verified this draft position.", "verified_at"),
    _by_position("dspark_accepted_tokens_per_pos", "Rounds that accepted this draft position.", "accepted_at"),
    _of_class("dspark_class_verify_rounds", "Verify rounds, by the request's text class.", "rounds_of_class"),
    _of_class("dspark_class_round_tokens", "Tokens of verify rounds, by text class.", "round_tokens_of_class"),
    _confidence("dspark_confidence_drafts", "Drafts judged by the target, predecessors accepted.", "trials"),
    _confidence("dspark_confidence_accepted", "Of these, accepted.", "accepted"),
    _confidence("dspark_confidence_stated", "Of these, acceptances as the drafter stated them.", "stated"),
    _confidence("dspark_confidence_believed", "Of these, acceptances as corrected for drift.", "believed"),
    _counter("dspark_untrimmed_plans", "Plans that verified every draft, for want of a curve.", "num_untrimmed_plans"),
    _counter("dspark_step_tokens", "Tokens the target ran: prefill, last tokens and drafts.", "num_step_tokens"),
    _counter("dspark_prefill_tokens", "Prompt tokens the target computed.", "num_prefill_tokens"),
    StatsSpec("dspark_step_seconds", "counter", "Seconds in each verb of the loop.", ("verb",), read=_verbs),
    _counter("dspark_predicted_step_seconds", "Draft and verify seconds as the cost curve said.", "predicted_s"),
    _counter("dspark_measured_step_seconds", "Draft and verify seconds of the steps with a prediction.", "measured_s"),
    _counter("dspark_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    _counter("dspark_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    _counter("dspark_preemptions", "Requests that lost their KV blocks and are recomputed.", "num_preemptions"),
    _counter("dspark_admitted_requests", "Requests that got their first KV blocks.", "num_admitted"),
    _counter("dspark_queue_seconds", "Seconds from arrival to the first KV block, summed.", "queue_s"),
    _by_label("dspark_finished_requests", "Requests ended by the engine, by finish reason.", "reason", "finished"),
    _by_label("dspark_failed_requests", "Requests the engine failed, by error.", "error", "failed"),
    _by_label("dspark_admission_rejections", "Requests the engine refused, by error.", "reason", "rejected"),
    _counter("dspark_gate_shut_steps", "Steps in which drafting was shut off as not worth it.", "num_gate_shut_steps"),
    _counter("dspark_gate_probes", "Steps that drafted only to see whether it is worth it again.", "num_gate_probes"),
    _counter("dspark_drafter_losses", "Times the drafter's worker was lost.", "num_drafter_losses"),
    _counter("dspark_verifier_losses", "Times the verifier's worker was lost.", "num_verifier_losses"),
    _gauge("dspark_requests_running", "Requests that hold KV blocks.", "num_live"),
    _gauge("dspark_requests_waiting", "Requests that wait for KV blocks.", "num_waiting"),
    StatsSpec("dspark_kv_cache_usage_ratio", "gauge", "KV blocks held by live requests, 0 to 1.", read=_kv_ratio),
    _gauge("dspark_kv_blocks_used", "KV blocks held by live requests.", "kv_blocks_used"),
    _gauge("dspark_kv_blocks_cached", "Idle KV blocks kept for prefix hits.", "kv_blocks_cached"),
    _gauge("dspark_kv_blocks_total", "KV blocks there are.", "kv_blocks_total"),
    _gauge("dspark_draft_width", "Most drafted tokens a round (gamma).", "draft_width"),
    _gauge("dspark_cost_curve_loaded", "1 when a measured cost curve is in force.", "curve_loaded"),
    _gauge("dspark_cost_curve_age_seconds", "Age of the cost curve.", "curve_age_s"),
    _gauge(
        "dspark_cost_curve_factor",
        "Seconds of a step of 16 tokens now over those of the saved curve.",
        "verify_cost_factor",
    ),
    StatsSpec(
        "dspark_draft_gate",
        "gauge",
        "1 for the state of the draft gate (off, open, partial, shut, suspended).",
        ("state",),
        read=_gate,
    ),
    _gauge("dspark_drafter_up", "1 when the drafter answers.", "drafter_alive"),
    _gauge("dspark_verifier_up", "1 when the verifier answers.", "verifier_alive"),
    _gauge("dspark_last_step_age_seconds", "Seconds since a step completed.", "last_step_age_s"),
    StatsSpec("dspark_trim_off", "gauge", "1 for the reason why no draft is trimmed.", ("reason",), read=_trim_off),
    StatsSpec(
        "dspark_planner_info",
        "gauge",
        "The planner in force.",
        ("planner",),
        read=lambda stats: {(stats.planner,): 1.0},
    ),
)

BUDGET = Spec(
    "dspark_verify_budget_tokens",
    "histogram",
    "Tokens verified per request and round: admitted drafts and the request's own one.",
)

# vLLM's names, for load generators and dashboards that know them. Draft tokens are those that were verified: a trimmed
# draft was never put to the target, and counting it would make acceptance look low.
ALIASES: tuple[StatsSpec, ...] = (
    _counter("vllm:spec_decode_num_drafts", "Alias of dspark_draft_rounds.", "num_draft_rounds"),
    _counter("vllm:spec_decode_num_draft_tokens", "Alias of dspark_verify_tokens.", "num_verified_tokens"),
    _counter("vllm:spec_decode_num_accepted_tokens", "Alias of dspark_accepted_tokens.", "num_accepted_tokens"),
    _by_position(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Alias of dspark_accepted_tokens_per_pos.", "accepted_at"
    ),
)

FIRST_TOKEN = Spec(
    "dspark_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival at the gateway to its first token.",
    ("model",),
    FIRST_TOKEN_S,
)
PER_TOKEN = Spec(
    "dspark_time_per_output_token_seconds",
    "histogram",
    "Per request: time from first to last token over tokens - 1.",
    ("model",),
    PER_TOKEN_S,
)
DURATION = Spec(
    "dspark_request_duration_seconds",
    "histogram",
    "From a request's arrival to its end.",
    ("model",),
    REQUEST_S,
)
REQUESTS = Spec(
    "dspark_requests",
    "counter",
    "Requests ended at this gateway: stop, length, cancelled, rejected or failed, and the HTTP status.",
    ("model", "outcome", "status"),
)
FAILURES = Spec(
    "dspark_request_errors",
    "counter",
    "Requests not served to their end, by the code in the error envelope.",
    ("model", "code"),
)
OPEN = Spec("dspark_gateway_open_requests", "gauge", "Requests this gateway has at the engine group.")
SCHEDULER_UP = Spec("dspark_scheduler_up", "gauge", "1 when the scheduler of the engine group answered this scrape.")

# Beside the labels of its own: every series of an engine group, and its aliases under vLLM's names for the same.
GROUP_LABELS = ("model", "group")
ALIAS_LABELS = ("model_name", "engine")

GATEWAY = (FIRST_TOKEN, PER_TOKEN, DURATION, REQUESTS, FAILURES, OPEN, SCHEDULER_UP)
CATALOGUE: tuple[Spec, ...] = (*SCHEDULER, BUDGET, *ALIASES, *GATEWAY)


def _one_each(numbers: Mapping[str, float]) -> dict[str, Samples]:
    return {group: {(): float(number)} for group, number in numbers.items()}


class _Snapshots(Collector):
    """Families of one scrape, from numbers that are already sums: those of each engine group."""

    def __init__(
        self, groups: Mapping[str, SchedulerStats | None], num_open: Mapping[str, int], model_name: str
    ) -> None:
        self._groups, self._num_open, self._model_name = groups, num_open, model_name

    def collect(self) -> Iterator[Metric]:
        yield self._family(OPEN, _one_each(self._num_open))
        yield self._family(SCHEDULER_UP, _one_each({name: s is not None for name, s in self._groups.items()}))
        alive = {name: stats for name, stats in self._groups.items() if stats is not None}
        if not alive:
            return
        for spec in (*SCHEDULER, *ALIASES):
            yield self._family(spec, {name: spec.read(stats) for name, stats in alive.items()})
        yield self._budget(alive)

    def _family(self, spec: Spec, samples: Mapping[str, Samples]) -> Metric:
        own = ALIAS_LABELS if spec.name.startswith("vllm:") else GROUP_LABELS
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = kind(spec.name, spec.help, labels=(*own, *spec.labels))
        for group, numbers in samples.items():
            for label_values, number in numbers.items():
                family.add_metric((self._model_name, group, *label_values), number)
        return family

    def _budget(self, groups: Mapping[str, SchedulerStats]) -> Metric:
        """Exact: the budget of a round is its verified drafts + 1, and `verified_at[k]` counts rounds above k."""
        family = HistogramMetricFamily(BUDGET.name, BUDGET.help, labels=GROUP_LABELS)
        for group, stats in groups.items():
            count = stats.verify_budget_count
            buckets = [(f"{k + 1}.0", float(count - above)) for k, above in enumerate(stats.verified_at)]
            buckets.append(("+Inf", float(count)))
            family.add_metric((self._model_name, group), buckets, float(stats.verify_budget_sum))
        return family


class GatewayMetrics:
    """What one gateway replica measured, and the page it shows."""

    def __init__(self) -> None:
        self.model_name = ""
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(FIRST_TOKEN)
        self._per_token = self._histogram(PER_TOKEN)
        self._duration = self._histogram(DURATION)
        self._requests = Counter(REQUESTS.name, REQUESTS.help, REQUESTS.labels, registry=self._registry)
        self._failures = Counter(FAILURES.name, FAILURES.help, FAILURES.labels, registry=self._registry)

    def _histogram(self, spec: Spec) -> Histogram:
        return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self._registry)

    def first_token(self, seconds: float) -> None:
        self._first_token.labels(self.model_name).observe(seconds)

    def time_per_output_token(self, seconds: float) -> None:
        self._per_token.labels(self.model_name).observe(seconds)

    def request_ended(self, outcome: str, status: int, seconds: float) -> None:
        self._requests.labels(self.model_name, outcome, str(status)).inc()
        self._duration.labels(self.model_name).observe(seconds)

    def failed(self, outcome: str, code: str) -> str:
        """Counts why; gives the outcome back."""
        self._failures.labels(self.model_name, code).inc()
        return outcome

    def render(self, groups: Mapping[str, SchedulerStats | None], num_open: Mapping[str, int]) -> bytes:
        """groups: the statistics of each engine group, None where it does not answer. num_open: this gateway's requests there."""
        snapshot = CollectorRegistry(auto_describe=False)
        snapshot.register(_Snapshots(groups, num_open, self.model_name))
        return generate_latest(snapshot) + generate_latest(self._registry)
