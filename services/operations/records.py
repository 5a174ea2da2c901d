"""The recording rules: what dashboards and alerts ask for over and over, evaluated once and kept under one name. Boards of one's
own, autoscalers and queries over weeks want these; the shipped dashboards ask for the counters themselves, since they are also
used where no rules are loaded.

A name says its labels, its numbers and its window, as Prometheus' own practice has it: `LABELS:what:how`.
"""

from __future__ import annotations

from dataclasses import dataclass

# Labels of one engine group, wherever ENGINE stands in an expression.
ENGINE_LABELS = "job, model, group"
_GROUP, _MODEL = "job_model_group", "job_model"


@dataclass(frozen=True, slots=True)
class Record:
    """expr: PromQL with ranges in minutes."""

    name: str
    expr: str
    about: str


def _rate(counter: str, minutes: int = 5) -> str:
    """Of an engine group, which every gateway replica shows the same."""
    return f"max by (ENGINE) (rate(dspark_{counter}_total[{minutes}m]))"


def _ratio(above: str, below: str) -> str:
    return f"{above} / ({below} > 0)"


def _summed(name: str) -> str:
    return f"sum by (job, model) ({_GROUP}:dspark_{name}:rate5m)"


_RATES = {
    "emitted_tokens": "Tokens a second that clients got.",
    "prefill_tokens": "Prompt tokens a second that were computed.",
    "draft_tokens": "Tokens a second that the drafter proposed.",
    "verify_tokens": "Drafted tokens a second that the plan put to the target.",
    "accepted_tokens": "Drafted tokens a second that the target accepted.",
    "round_tokens": "Tokens a second that verify rounds yielded.",
    "verify_rounds": "Verify rounds a second.",
}
_OF_GROUPS = tuple(Record(f"{_GROUP}:dspark_{name}:rate5m", _rate(name), about) for name, about in _RATES.items())
_OF_MODELS = tuple(
    Record(f"{_MODEL}:dspark_{name}:rate5m", _summed(name), f"{about[:-1]}, all engine groups together.")
    for name, about in _RATES.items()
)


def _accept_length(level: str) -> Record:
    return Record(
        f"{level}:dspark_accept_length:ratio_rate5m",
        _ratio(f"{level}:dspark_round_tokens:rate5m", f"{level}:dspark_verify_rounds:rate5m"),
        "Tokens per verify round; 1 is plain decoding.",
    )


def _verify_budget(level: str) -> Record:
    return Record(
        f"{level}:dspark_verify_budget:ratio_rate5m",
        f"1 + {_ratio(f'{level}:dspark_verify_tokens:rate5m', f'{level}:dspark_verify_rounds:rate5m')}",
        "Tokens verified per request and round: admitted drafts and the request's own one.",
    )


DRAFTED_LENGTH = Record(
    f"{_GROUP}:dspark_drafted_round_length:ratio_rate10m",
    f"1 + {_ratio(_rate('accepted_tokens', 10), _rate('draft_rounds', 10))}",
    "Tokens per verify round, of rounds that had drafts.",
)
STEP_SECONDS = Record(
    f"{_GROUP}:dspark_step_seconds_real_over_predicted:ratio_rate15m",
    _ratio(_rate("measured_step_seconds", 15), _rate("predicted_step_seconds", 15)),
    "Seconds of steps over what the cost curve said.",
)
FAILED = Record(
    f"{_MODEL}:dspark_requests_failed:ratio_rate5m",
    _ratio(
        'sum by (job, model) (rate(dspark_requests_total{outcome="failed"}[5m]))',
        "sum by (job, model) (rate(dspark_requests_total[5m]))",
    ),
    "Share of requests that failed through no fault of their clients.",
)

# In the order of evaluation: what a rule asks for stands above it.
RECORDS = (
    *_OF_GROUPS,
    *_OF_MODELS,
    *(each(level) for level in (_GROUP, _MODEL) for each in (_accept_length, _verify_budget)),
    DRAFTED_LENGTH,
    STEP_SECONDS,
    FAILED,
)
