"""The rule file, and its alerts: what each watches, for how long, and what it says. A gateway shows its engine's numbers as they
are, every replica the same, hence `max by` the labels of an engine group before anything else.

Ranges and `for` are minutes. Tests that cause the alerts in a running server shorten the minute; the expressions stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from services.operations.records import DRAFTED_LENGTH, ENGINE_LABELS, FAILED, RECORDS, STEP_SECONDS, Record

RUNBOOKS = "docs/runbooks"
_HEADER = """# Alerts on an engine group or a gateway, and recorded series, as Prometheus reads them. Made by
# `python -m services.operations` of services/operations/alerts.py and records.py.
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """expr: PromQL with ranges in minutes. minutes: how long it must hold. runbook: a page of docs/runbooks."""

    name: str
    expr: str
    minutes: int
    severity: Literal["warning", "critical"]
    summary: str
    description: str
    runbook: str


ALERTS = (
    Alert(
        "DsparkErrors",
        f"{FAILED.name} > 0.05",
        10,
        "critical",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.model }} fail",
        "Requests fail through no fault of their clients.",
        "errors",
    ),
    Alert(
        "DsparkSlowFirstToken",
        "histogram_quantile(0.95, sum by (job, model, le) (rate(dspark_time_to_first_token_seconds_bucket[5m]))) > 10",
        10,
        "warning",
        "A twentieth of the requests of {{ $labels.model }} wait more than {{ $value | humanizeDuration }} for the first token",
        "Queueing or long prompts hold up first tokens.",
        "first-token",
    ),
    Alert(
        "DsparkQueueGrows",
        "max by (ENGINE) (min_over_time(dspark_requests_waiting[10m])) > 8",
        5,
        "warning",
        "{{ $value }} or more requests have been waiting at {{ $labels.model }} for ten minutes",
        "More requests arrive than the engine serves.",
        "queue",
    ),
    Alert(
        "DsparkRefusesRequests",
        "sum by (ENGINE, reason) (max by (ENGINE, reason) "
        '(rate(dspark_admission_rejections_total{reason="Overloaded"}[5m]))) > 0',
        5,
        "warning",
        "{{ $labels.model }} refuses requests because its queue is full",
        "Clients get 429.",
        "queue",
    ),
    Alert(
        "DsparkAcceptLengthCollapsed",
        f"{DRAFTED_LENGTH.name} < 1.2",
        10,
        "warning",
        "Drafted rounds of {{ $labels.model }} yield {{ $value | humanize }} tokens",
        "Drafts are hardly ever accepted; the drafter may not belong to the target.",
        "accept-length",
    ),
    Alert(
        "DsparkCalibrationDrifts",
        "abs("
        "sum by (ENGINE) (max by (ENGINE, text_class, position) (rate(dspark_confidence_stated_total[30m])))"
        " - sum by (ENGINE) (max by (ENGINE, text_class, position) (rate(dspark_confidence_accepted_total[30m])))"
        ") / (sum by (ENGINE) (max by (ENGINE, text_class, position) (rate(dspark_confidence_drafts_total[30m]))) > 0)"
        " > 0.15",
        30,
        "warning",
        "The drafter of {{ $labels.model }} is wrong about its own drafts by {{ $value | humanizePercentage }}",
        "Stated confidence and real acceptance are apart; verify budgets are chosen worse.",
        "calibration",
    ),
    Alert(
        "DsparkCostCurveMissing",
        "max by (ENGINE, reason) (dspark_trim_off) == 1",
        10,
        "warning",
        "{{ $labels.model }} trims no drafts: {{ $labels.reason }}",
        "Without a cost curve every draft is verified, also under load.",
        "cost-curve",
    ),
    Alert(
        "DsparkCostCurveStale",
        f"abs({STEP_SECONDS.name} - 1) > 0.5",
        15,
        "warning",
        "Steps of {{ $labels.model }} are {{ $value | humanizePercentage }} away from the cost curve",
        "The device is slower or faster than when the curve was measured.",
        "cost-curve",
    ),
    Alert(
        "DsparkWorkerLost",
        "max by (ENGINE) (increase(dspark_verifier_losses_total[15m]))"
        " + max by (ENGINE) (increase(dspark_drafter_losses_total[15m])) > 0",
        0,
        "warning",
        "A worker of {{ $labels.model }} was lost within 15 minutes",
        "It is started again; requests are computed again or decode without drafts meanwhile.",
        "worker-lost",
    ),
    Alert(
        "DsparkVerifierDown",
        "max by (ENGINE) (dspark_verifier_up) == 0",
        2,
        "critical",
        "The verifier of {{ $labels.model }} does not answer",
        "Nothing is served until it is back.",
        "worker-lost",
    ),
    Alert(
        "DsparkDrafterDown",
        "max by (ENGINE) (dspark_drafter_up) == 0 and max by (ENGINE) (dspark_draft_width) > 0",
        10,
        "warning",
        "The drafter of {{ $labels.model }} does not answer",
        "The engine decodes without drafts.",
        "worker-lost",
    ),
    Alert(
        "DsparkStalled",
        "max by (ENGINE) (dspark_last_step_age_seconds) > 60 and max by (ENGINE) (dspark_requests_running) > 0",
        2,
        "critical",
        "{{ $labels.model }} has requests and has made no step for {{ $value | humanizeDuration }}",
        "The loop or a worker hangs.",
        "stalled",
    ),
    Alert(
        "DsparkKvExhausted",
        "max by (ENGINE) (dspark_kv_cache_usage_ratio) > 0.95 and max by (ENGINE) (dspark_requests_waiting) > 0",
        10,
        "warning",
        "The KV cache of {{ $labels.model }} is full and requests wait for it",
        "Running requests are preempted and computed again.",
        "kv-exhausted",
    ),
    Alert(
        "DsparkSchedulerDown",
        # one that was never up is not down: a large model takes its time to load
        "max by (job, group) (dspark_scheduler_up) == 0 and max by (job, group) (max_over_time(dspark_scheduler_up[30m])) == 1",
        2,
        "critical",
        "No gateway of {{ $labels.job }} reaches the scheduler of group {{ $labels.group }} any more",
        "Its requests end with 503; new ones go to other groups, and get 503 where there is none.",
        "scheduler-down",
    ),
    Alert(
        "DsparkNotReady",
        "max by (job, group) (dspark_scheduler_up) == 0",
        30,
        "critical",
        "The scheduler of group {{ $labels.group }} of {{ $labels.job }} has not been ready for half an hour",
        "It does not get ready at all, or its model takes longer to load than the start may take; /ready says what is under way.",
        "scheduler-down",
    ),
    Alert(
        "DsparkAbsent",
        "absent(dspark_scheduler_up)",
        5,
        "critical",
        "There are no metrics of DSpark Serve",
        "No gateway is scraped; the server may be down, or the scrape refused.",
        "absent",
    ),
)


def rules(minute_s: float = 60.0) -> dict[str, Any]:
    """The rule file. minute_s: seconds of a minute, less than 60 where nobody can wait that long."""
    return {
        "groups": [
            {"name": "dspark", "rules": [_rule(alert, minute_s) for alert in ALERTS]},
            {"name": "dspark-recorded", "rules": [_record(record, minute_s) for record in RECORDS]},
        ]
    }


def rules_file() -> str:
    return _HEADER + yaml.safe_dump(rules(), sort_keys=False, width=1000)


def _expression(expr: str, minute_s: float) -> str:
    return in_minutes_of(expr.replace("ENGINE", ENGINE_LABELS), minute_s)


def _record(record: Record, minute_s: float) -> Mapping[str, Any]:
    return {"record": record.name, "expr": _expression(record.expr, minute_s)}


def _rule(alert: Alert, minute_s: float) -> Mapping[str, Any]:
    held = {"for": _duration(alert.minutes * minute_s)} if alert.minutes else {}
    return {
        "alert": alert.name,
        "expr": _expression(alert.expr, minute_s),
        **held,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{RUNBOOKS}/{alert.runbook}.md",
        },
    }


def in_minutes_of(expression: str, minute_s: float) -> str:
    """The expression with its ranges, all of whole minutes, in minutes of so many seconds."""
    return re.sub(r"\[(\d+)m\]", lambda found: f"[{_duration(int(found[1]) * minute_s)}]", expression)


def _duration(seconds: float) -> str:
    for unit, size in (("m", 60.0), ("s", 1.0)):
        if seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms"
