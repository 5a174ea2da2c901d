"""A real Prometheus scrapes a real server under mixed traffic: what every dashboard, rule and runbook asks for is there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from services.operations.alerts import in_minutes_of, rules
from services.operations.dashboards import DASHBOARDS
from tests.integration.character_tokenizer import save_tokenizer
from tests.mixed_traffic import send
from tests.running_prometheus import RunningPrometheus, needs_prometheus, until
from tests.running_server import RunningServer, small_settings

pytestmark = needs_prometheus
ROOT = Path(__file__).resolve().parents[2]
MINUTE_S = 3.0
RULES = rules(MINUTE_S)
# What stays empty in a server that is well, and why. Whatever else is empty is a fault; so is an entry here that has data.
HEALTHY = "the alert's condition does not hold"
EMPTY = {
    "speculation: Why nothing is trimmed": "a cost curve is in force",
    "absent.md: absent(dspark_scheduler_up)": "the server is scraped",
    "DsparkAbsent": HEALTHY,
    "DsparkCostCurveMissing": HEALTHY,
    "DsparkCostCurveMissing, without its threshold": "the series is there only while a reason is",
    "DsparkDrafterDown": HEALTHY,
    "DsparkNotReady": HEALTHY,
    "DsparkQueueGrows": HEALTHY,
    "DsparkSchedulerDown": HEALTHY,
    "DsparkSlowFirstToken": HEALTHY,
    "DsparkStalled": HEALTHY,
    "DsparkVerifierDown": HEALTHY,
    "DsparkWorkerLost": HEALTHY,
}
# Whether these hold depends on how fast this machine is at the moment.
EITHER = {
    "DsparkAcceptLengthCollapsed",
    "DsparkCalibrationDrifts",
    "DsparkCostCurveStale",
    "DsparkErrors",
    "DsparkKvExhausted",
}


def filled_in(expression: str) -> str:
    for name, value in (("$__rate_interval", "12s"), ("$job", ".*"), ("$group", ".*"), ("$model", ".*")):
        expression = expression.replace(name, value)
    return in_minutes_of(expression, MINUTE_S)


def asked() -> dict[str, str]:
    """By where it stands: every expression of dashboards, their variables, runbooks and rules."""
    found: dict[str, str] = {}
    for name, board in DASHBOARDS.items():
        for panel in board["panels"]:
            for number, target in enumerate(panel.get("targets", [])):
                found[f"{name}: {panel['title']}" + (f" ({number})" if number else "")] = target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found[f"{name}: ${variable['name']}"] = _series_of(variable["query"]["query"])
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL):
            found |= {f"{page.name}: {line}": line for line in block.splitlines() if line.strip()}
    for rule in RULES["groups"][1]["rules"]:
        found |= {rule["record"]: rule["record"], f"{rule['record']}, asked for": rule["expr"]}
    for rule in RULES["groups"][0]["rules"]:
        found[rule["alert"]] = rule["expr"]
        watched = _watched(promql.parse(rule["expr"]))
        if watched != [rule["expr"]]:
            found[f"{rule['alert']}, without its threshold"] = watched[0]
            found |= {f"{rule['alert']}, and ({number})": each for number, each in enumerate(watched[1:])}
    return {where: filled_in(expression) for where, expression in found.items()}


def _series_of(query: str) -> str:
    """Of Grafana's label_values(SERIES, LABEL): the series that must have the label."""
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert found
    return f'count by ({found[2]}) ({found[1]}) and count by ({found[2]}) ({{{found[2]}!=""}})'


def _watched(node: Any) -> list[str]:
    """The numbers that an alert compares: what must be there for it ever to fire."""
    if isinstance(node, promql.BinaryExpr):
        if str(node.op) == "and":
            return _watched(node.lhs) + _watched(node.rhs)
        if str(node.op) in ("==", ">", "<", ">=", "<=", "!="):
            return _watched(node.lhs)
    return [node.prettify()]


@pytest.fixture(scope="module")
def server(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("scraped")
    target = Path(shutil.copytree(golden / "target", folder / "target"))
    save_tokenizer(target, json.loads((target / "config.json").read_text())["vocab_size"])
    settings = small_settings(
        target,
        str(golden / "dspark_vanilla"),
        folder,
        model={"name": "golden"},
        scheduler={"planner": "auto", "max_live": 3, "max_waiting": 4, "prefill_chunk": 16},
        kv={"num_blocks": 24, "block_size": 8},
    )
    with RunningServer(settings) as running:
        yield running


def is_all_there(server: RunningServer, prometheus: RunningPrometheus) -> bool:
    stats = server.ask(server.engine.snapshot())
    return bool(prometheus.query(f"dspark_emitted_tokens_total == {stats.num_emitted_tokens}"))


@pytest.fixture(scope="module")
def prometheus(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrometheus]:
    """It has seen some seconds of traffic, and the series of what happened before those was already there."""
    folder = tmp_path_factory.mktemp("prometheus")
    url = server.url.removesuffix("/v1")
    with RunningPrometheus(folder, {"dspark": f"127.0.0.1:{server.port}"}, RULES) as running:
        send(url, "golden", at_once=10, least=1)
        until(lambda: running.query("dspark_requests_total"))
        send(url, "golden", at_once=10, least=4)
        until(lambda: is_all_there(server, running))
        yield running


@pytest.fixture(scope="module")
def answers(prometheus: RunningPrometheus) -> dict[str, bool]:
    """Where an expression stands -> whether it has data, all asked within a moment of the traffic."""
    return {where: bool(prometheus.query(expression)) for where, expression in asked().items()}


def test_every_expression_has_data_or_a_reason_why_not(answers):
    assert len(answers) > 110
    empty = {where for where, has_data in answers.items() if not has_data}
    assert empty - EITHER == set(EMPTY)


def test_every_reason_belongs_to_an_expression(answers):
    assert set(EMPTY) | EITHER <= set(answers)


def test_prometheus_has_taken_the_rules_and_no_evaluation_failed(prometheus):
    taken = prometheus.rules()
    shipped = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert sorted(rule["name"] for rule in taken) == sorted(rule.get("alert") or rule["record"] for rule in shipped)
    assert {rule["health"] for rule in taken} == {"ok"}
    assert not prometheus.query("prometheus_rule_evaluation_failures_total > 0")


def test_numbers_in_prometheus_are_those_of_the_servers_page(server, prometheus):
    """Once it is idle: nothing is lost or counted twice on the way."""
    until(lambda: is_all_there(server, prometheus))
    stats = server.ask(server.engine.snapshot())
    (accepted,) = prometheus.query("sum(dspark_accepted_tokens_per_pos_total)")
    assert float(accepted["value"][1]) == stats.num_accepted_tokens > 0
    (failed,) = prometheus.query('sum(dspark_requests_total{outcome="failed", status="504"})')
    assert float(failed["value"][1]) > 0
