"""Dashboards, alert rules, runbooks and the metrics page against the catalogue: one set of names, suffixes and labels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from services.metrics import CATALOGUE, GATEWAY, OPEN, SCHEDULER_UP, Spec
from services.operations.dashboards import DASHBOARDS
from services.operations.records import ENGINE_LABELS, RECORDS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "helm" / "dspark-serve" / "rules" / "dspark.yaml"
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
ALERTS = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {f"{spec.name}{suffix}": spec for spec in CATALOGUE for suffix in SUFFIXES[spec.kind]}
RECORDED = {record.name: set(record.name.partition(":")[0].split("_")) for record in RECORDS}
# Prometheus adds the first two to whatever it scrapes.
ALWAYS = {"job", "instance", "model"}
MAY_FALL = {"rate", "increase"}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, board in DASHBOARDS.items():
        yield from ((name, panel) for panel in board["panels"] if panel["type"] != "row")


def expressions() -> Iterator[tuple[str, str]]:
    for name, panel in panels():
        yield from ((f"{name}: {panel['title']}", target["expr"]) for target in panel["targets"])
    yield from ((rule["alert"], rule["expr"]) for rule in ALERTS)
    yield from ((record.name, record.expr.replace("ENGINE", ENGINE_LABELS)) for record in RECORDS)
    for page in [*RUNBOOKS, *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```promql\n(.*?)```", page.read_text(), re.S):
            yield from ((page.name, line) for line in block.splitlines() if line.strip())


def labels_of(spec: Spec, name: str) -> set[str]:
    own = {"group"} if spec not in GATEWAY or spec in (OPEN, SCHEDULER_UP) else set()
    return ALWAYS | own | set(spec.labels) | ({"le"} if name.endswith("_bucket") else set())


def check(node: Any, within: str = "") -> set[str]:
    """Asserts on every name below `node`; gives the labels that its result may be grouped by."""
    match node:
        case promql.VectorSelector() | promql.MatrixSelector():
            selector = node.vector_selector if isinstance(node, promql.MatrixSelector) else node
            if selector.name in RECORDED:
                assert within not in MAY_FALL, f"{selector.name} is a rate already"
                return RECORDED[selector.name]
            assert selector.name in EXPORTED, f"no metric {selector.name} is exported"
            spec = EXPORTED[selector.name]
            known = labels_of(spec, selector.name)
            assert {matcher.name for matcher in selector.matchers.matchers} <= known, selector.name
            assert (within in MAY_FALL) == (spec.kind != "gauge"), f"{selector.name} within {within or 'no function'}"
            return known
        case promql.AggregateExpr():
            known = check(node.expr, within)
            by = set(node.modifier.labels) if node.modifier else set()
            assert by <= known, f"{by - known} are no labels of {node.expr.prettify()}"
            return by
        case promql.Call():
            name = node.func.name
            inner = within if name in ("abs", "ceil", "histogram_quantile", "absent") else name
            if name in ("min_over_time", "avg_over_time"):
                inner = ""
            found = [check(each, inner) for each in node.args]
            return set.union(*found)
        case promql.BinaryExpr():
            return check(node.lhs, within) | check(node.rhs, within)
        case promql.ParenExpr() | promql.UnaryExpr():
            return check(node.expr, within)
        case promql.NumberLiteral() | promql.StringLiteral():
            return set()
    raise AssertionError(f"this test does not know {type(node).__name__}")


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_name_metrics_and_labels_that_are_exported(where, expression):
    check(promql.parse(expression.replace("$__rate_interval", "5m")))


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(dspark_steps[5m])", "no metric dspark_steps"),
        ("sum by (position) (rate(dspark_steps_total[5m]))", "position"),
        ('rate(dspark_steps_total{verb="draft"}[5m])', "dspark_steps_total"),
        ("dspark_steps_total", "within no function"),
        ("rate(dspark_requests_waiting[5m])", "within rate"),
        ("dspark_requests_waitin", "no metric"),
    ],
)
def test_the_check_finds_wrong_names_labels_and_functions(expression, fault):
    with pytest.raises(AssertionError, match=fault):
        check(promql.parse(expression))


def test_every_metric_of_the_engine_and_the_gateway_is_on_a_dashboard():
    shown = " ".join(target["expr"] for _, panel in panels() for target in panel["targets"])
    shown += json.dumps(DASHBOARDS["overview"]["templating"])
    missing = {spec.name for spec in CATALOGUE if not re.search(rf"\b{spec.name}(_total|_bucket)?\b", shown)}
    aliases = {name for name in missing if name.startswith("vllm:")}
    twice = {"dspark_cost_curve_loaded", "dspark_draft_width", "dspark_draft_rounds", "dspark_kv_cache_usage_ratio"}
    assert missing - aliases == twice, "these say what another shown number says; show the rest"


def test_every_panel_says_what_it_means_in_which_unit():
    units = {"s", "percentunit", "short", "reqps", "ops", "none"}
    for name, panel in panels():
        assert panel["description"].endswith("."), (name, panel["title"])
        assert panel["fieldConfig"]["defaults"]["unit"] in units
        names = " ".join(target["expr"] for target in panel["targets"])
        if panel["title"].startswith(("Time", "Since", "Age")):
            assert panel["fieldConfig"]["defaults"]["unit"] == "s", names


@pytest.mark.parametrize("name", DASHBOARDS)
def test_boards_are_classic_and_their_panels_do_not_overlap(name):
    board = DASHBOARDS[name]
    assert board["id"] is None and len(board["uid"]) <= 40 and board["schemaVersion"] in (39, 40, 41)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        for part in [panel, *panel.get("targets", [])]:
            assert panel["type"] == "row" or part["datasource"]["uid"] == "${datasource}"


def test_every_alert_has_a_runbook_that_names_it_and_every_runbook_an_alert():
    linked: dict[str, set[str]] = {}
    for rule in ALERTS:
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        linked.setdefault(rule["annotations"]["runbook_url"], set()).add(rule["alert"])
    named = {
        str(page.relative_to(ROOT)): set(re.findall(r"`(Dspark\w+)`", page.read_text().split("\n")[2]))
        for page in RUNBOOKS
    }
    assert linked == named


def test_metrics_named_in_the_documentation_are_exported():
    pages = [ROOT / "README.md", ROOT / "helm" / "dspark-serve" / "README.md", *(ROOT / "docs").rglob("*.md")]
    known = set(EXPORTED) | {spec.name for spec in CATALOGUE if spec.kind == "histogram"}
    for page in pages:
        text = page.read_text()
        recorded = re.findall(r"\b\w+:dspark_\w+:\w+", text)
        assert set(recorded) <= set(RECORDED), page.name
        for name in recorded:
            text = text.replace(name, "")
        for name in re.findall(r"\bdspark_[a-z_]+[a-z]\b(?!\*|_\*|\.)", text):
            assert name in known or name == "dspark_serve", f"{page.name}: {name}"


def test_recorded_series_have_the_labels_that_their_names_say_and_stand_below_what_they_are_made_of():
    names = [record.name for record in RECORDS]
    assert len(names) == len(set(names))
    for number, record in enumerate(RECORDS):
        labels = check(promql.parse(record.expr.replace("ENGINE", ENGINE_LABELS)))
        assert labels == RECORDED[record.name], record.name
        assert set(re.findall(r"\w+:dspark_\w+:\w+", record.expr)) <= set(names[:number])
        windows = set(re.findall(r"\[(\d+m)\]", record.expr))
        assert all(record.name.endswith(f"rate{window}") for window in windows), record.name
        assert set(re.findall(r"rate\d+m$", record.name)), record.name


@pytest.mark.parametrize(
    "page", [*RUNBOOKS, ROOT / "docs" / "metrics.md", ROOT / "docs" / "operating.md"], ids=lambda page: page.name
)
def test_links_and_settings_in_pages_for_operators_lead_somewhere(page):
    from services.settings import known_keys

    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    settings = {".".join(path) for path in known_keys()}
    sections = "scheduler|gateway|kv|model|drafter|resources"
    for name in re.findall(rf"`(?:settings\.)?((?:{sections})\.[a-z_.]+)", text):
        assert name in settings, f"{page.name}: {name}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_alerts_fire_and_rules_record_on_the_series_that_promtool_plays():
    data = ROOT / "tests" / "data"
    played = [["test", "rules", str(data / name)] for name in ("alerts.yaml", "records.yaml")]
    for command in (["check", "rules", str(RULES)], *played):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
