"""The expressions that dashboards are made of, by kind of number. Knows the catalogue's conventions; must not know panels.

Every gateway replica shows the same sums of an engine group, so these are taken once per group (`max by (job,
model, group, ...)`) before anything is added up; what a gateway measured itself is added over gateways. Ratios are of rates of
counters.
"""

from __future__ import annotations

from services.metrics import CATALOGUE, GROUP_LABELS, Spec

WINDOW = "$__rate_interval"
SELECTED = 'job=~"$job", model=~"$model"'
OF_GROUP = f'{SELECTED}, group=~"$group"'
_SPECS = {spec.name: spec for spec in CATALOGUE}


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _selector(where: str, selected: str = OF_GROUP) -> str:
    return f"{{{selected}, {where}}}" if where else f"{{{selected}}}"


def _series_labels(spec: Spec) -> tuple[str, ...]:
    return ("job", *GROUP_LABELS, *spec.labels)


def engine(counter: str, *labels: str, where: str = "") -> str:
    """A counter of the engine, per second, summed by `labels`. counter: its name in the catalogue."""
    once = _by(_series_labels(_SPECS[counter]))
    return f"sum{_by(labels)} (max{once} (rate({counter}_total{_selector(where)}[{WINDOW}])))"


def lost(counter: str) -> str:
    """How much a counter of an engine group rose within the last hour."""
    once = _by(_series_labels(_SPECS[counter]))
    return f"sum by (job, group) (max{once} (increase({counter}_total{_selector('')}[1h])))"


def gauge(name: str, *labels: str, where: str = "") -> str:
    """A gauge of the engine, summed by `labels`."""
    return f"sum{_by(labels)} (max{_by(_series_labels(_SPECS[name]))} ({name}{_selector(where)}))"


def gateway(counter: str, *labels: str, where: str = "") -> str:
    """A counter of the gateways, per second, summed by `labels`."""
    return f"sum{_by(labels)} (rate({counter}_total{_selector(where, SELECTED)}[{WINDOW}]))"


def quantile(q: float, histogram: str, *labels: str) -> str:
    """Of a histogram of the gateways."""
    return f"histogram_quantile({q}, sum{_by(('le', *labels))} (rate({histogram}_bucket{_selector('', SELECTED)}[{WINDOW}])))"


def buckets(histogram: str) -> str:
    """Of a histogram of the engine, for a heatmap."""
    return f"sum by (le) (max by (job, model, group, le) (rate({histogram}_bucket{_selector('')}[{WINDOW}])))"


def ratio(above: str, below: str) -> str:
    """Empty where nothing happened."""
    return f"{above} / ({below} > 0)"
