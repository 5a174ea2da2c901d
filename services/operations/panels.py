"""Panels and boards in Grafana's classic JSON. Knows the format; must not know what is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Panel:
    """lines: expression and legend of each. unit: Grafana's id. width: of 24 columns. most: top of the axis."""

    title: str
    about: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "none"
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def board(uid: str, title: str, about: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    """A dashboard; panels flow from left to right below the title of their row."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append(_row(len(panels) + 1, row.title, top))
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            height = 4 if panel.kind == "stat" else 8
            if left + panel.width > 24:
                top, left, tallest = top + tallest, 0, 0
            panels.append(_panel(len(panels) + 1, panel, {"x": left, "y": top, "w": panel.width, "h": height}))
            left, tallest = left + panel.width, max(tallest, height)
        top += tallest
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["dspark"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), *_VARIABLES]},
        "annotations": {"list": []},
        "links": [_link()],
        "panels": panels,
    }


def _link() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "DSpark",
        "tags": ["dspark"],
        "asDropdown": False,
        "keepTime": True,
        "includeVars": True,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(name: str, within: str) -> dict[str, Any]:
    selector = f"{{{within}}}" if within else ""
    query = f"label_values(dspark_scheduler_up{selector}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
    }


_VARIABLES = (
    _variable("job", ""),
    _variable("model", 'job=~"$job"'),
    _variable("group", 'job=~"$job", model=~"$model"'),
)


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 0,
            "stacking": stacking,
        }
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False},
            "textMode": "auto",
            "colorMode": "none",
        }
    else:
        options = {"calculate": False, "yAxis": {"unit": panel.unit}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(index, panel, *line) for index, line in enumerate(panel.lines)],
    }


def _target(index: int, panel: Panel, expression: str, legend: str) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": False,
        "range": True,
    }
