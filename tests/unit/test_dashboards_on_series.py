"""Every expression of dashboards and runbooks returns data on the series that a gateway's own page has, evaluated by Prometheus'
engine (promtool), from two gateway replicas of one engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scheduler.drift import DriftRow
from scheduler.stats import SchedulerStats
from services.metrics import GatewayMetrics
from services.operations.dashboards import DASHBOARDS
from services.operations.promql import engine, gateway, gauge, ratio

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


def busy() -> SchedulerStats:
    """Statistics in which nothing is zero."""
    stated: dict[str, Any] = {
        "verified_at": (30, 20, 10),
        "accepted_at": (24, 12, 4),
        "finished": {"stop": 3},
        "failed": {"VerifierLost": 1},
        "rejected": {"Overloaded": 2},
        "rounds_of_class": {"code": 40},
        "round_tokens_of_class": {"code": 110},
        "drift": (DriftRow("code", (8.0, 5.0), (6.0, 3.0), (7.5, 4.5), (6.2, 3.1)),),
        "planner": "auto",
        "gate_state": "open",
        "trim_off_reason": "no cost curve",
        "num_drafted_tokens": 70,
        "num_verified_tokens": 60,
        "num_accepted_tokens": 40,
        "num_rounds": 40,
        "num_round_tokens": 80,
        "verify_budget_sum": 100,
        "verify_budget_count": 40,
        "kv_blocks_used": 5,
        "kv_blocks_total": 20,
    }
    for field in dataclasses.fields(SchedulerStats):
        value = getattr(SchedulerStats(), field.name)
        if field.name not in stated and isinstance(value, int | float):
            stated[field.name] = type(value)(2)
    return SchedulerStats(**stated)


def series() -> list[dict[str, str]]:
    """As promtool plays them: counters rise by what the page says every minute, gauges stay."""
    metrics = GatewayMetrics()
    metrics.model_name = "m"
    metrics.first_token(0.2)
    metrics.time_per_output_token(0.02)
    metrics.request_ended("stop", 200, 1.0)
    metrics.request_ended("failed", 500, 1.0)
    metrics.failed("failed", "internal_error")
    played = []
    for family in text_string_to_metric_families(metrics.render({"0": busy()}, {"0": 3}).decode()):
        for sample in family.samples:
            for instance in ("a:8000", "b:8000"):
                labels = {"job": "dspark", "instance": instance, **sample.labels}
                inside = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
                rising = family.type in ("counter", "histogram")
                values = f"0+{sample.value}x30" if rising else f"{sample.value}x30"
                played.append({"series": f"{sample.name}{{{inside}}}", "values": values})
    return played


def filled_in(expression: str) -> str:
    for name, value in (("$__rate_interval", "5m"), ("$job", ".*"), ("$model", ".*"), ("$group", ".*")):
        expression = expression.replace(name, value)
    return expression


def play(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    file = tmp_path / "expressions.yaml"
    case = {"interval": "1m", "input_series": series(), "promql_expr_test": tests}
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def expected(expression: str, value: float, labels: str = "{}") -> dict[str, Any]:
    return {
        "expr": filled_in(expression),
        "eval_time": "20m",
        "exp_samples": [{"labels": labels, "value": value}],
    }


def test_every_panel_has_data_where_the_server_is_busy(tmp_path):
    shown = [
        target["expr"]
        for board in DASHBOARDS.values()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    assert len(shown) > 60
    play(tmp_path, [expected(f"clamp_max(count({each}), 1)", 1.0) for each in shown])


def test_runbooks_ask_what_can_be_answered(tmp_path):
    lines = [
        line
        for page in sorted((ROOT / "docs" / "runbooks").glob("*.md"))
        for line in page.read_text().split("```promql\n")[1].split("```")[0].splitlines()
        if not line.startswith("absent(")  # empty is what a healthy server answers
    ]
    assert len(lines) > 15
    play(tmp_path, [expected(f"clamp_max(count({each}), 1)", 1.0) for each in lines])


def test_an_engine_behind_two_gateways_counts_once_and_gateways_add_up(tmp_path):
    per_minute = 1 / 60
    play(
        tmp_path,
        [
            expected(f"round({engine('dspark_verify_tokens')} * 60)", 60.0),
            expected(
                f"round({engine('dspark_accepted_tokens_per_pos', 'position')} * 60) == 12", 12.0, '{position="1"}'
            ),
            expected(ratio(engine("dspark_round_tokens"), engine("dspark_verify_rounds")), 2.0),
            expected(gauge("dspark_kv_blocks_total"), 20.0),
            expected(f"round({gateway('dspark_requests')} / {per_minute})", 4.0),
        ],
    )
