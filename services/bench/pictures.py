"""The paper's pictures from our own numbers: aggregate against per-user speed (its Fig. 7), throughput and verify budget against
load (Fig. 8), and the ratio to the best fixed arm. Must not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """One arm at one load. ratio: to the best fixed arm; None where no fixed arm ran."""

    panel: str
    planner: str
    load: float
    tokens_per_s: float
    user_tokens_per_s: float
    budget: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Ramp:
    """One arm while the load rises and falls: [n] each, by time. live: requests decoding."""

    seconds: list[float]
    live: list[float]
    tokens_per_s: list[float]
    budget: list[float]

    def by_stage(self, stage_s: float, num_stages: int) -> list[tuple[float, float]]:
        """Means of tokens per second and budget in each of so many stages; 0 where nothing ran."""
        means = []
        for stage in range(num_stages):
            inside = [i for i, at in enumerate(self.seconds) if stage * stage_s < at <= (stage + 1) * stage_s + 1e-9]
            each = [sum(column[i] for i in inside) / max(1, len(inside)) for column in (self.tokens_per_s, self.budget)]
            means.append((each[0], each[1]))
        return means


def draw(
    points: Sequence[Point], path: str, title: str, *, ramps: Mapping[str, Mapping[str, Ramp]] | None = None
) -> None:
    """A row of four pictures per panel (kind of text, kind of load)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(point.panel for point in points))
    ramps = ramps or {}
    num_rows = len(panels) + len(ramps)
    figure, axes = plt.subplots(num_rows, 4, figsize=(18, 3.8 * num_rows), layout="constrained", squeeze=False)
    for row, panel in zip(axes, panels, strict=False):
        mine = [point for point in points if point.panel == panel]
        for number, planner in enumerate(dict.fromkeys(point.planner for point in mine)):
            arm = sorted((p for p in mine if p.planner == planner), key=lambda p: p.load)
            _draw_arm(row, arm, _style(planner, number))
        _label(row, panel, "arrivals per second" if "open loop" in panel else "concurrency")
    for row, (panel, arms) in zip(axes[len(panels) :], ramps.items(), strict=True):
        for number, (planner, ramp) in enumerate(arms.items()):
            _draw_ramp(row, ramp, _style(planner, number))
        _label_ramp(row, panel)
    for row in axes:
        row[0].legend(fontsize="x-small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_arm(row: Sequence[Any], points: Sequence[Point], style: dict[str, Any]) -> None:
    loads = [p.load for p in points]
    row[0].plot([p.user_tokens_per_s for p in points], [p.tokens_per_s for p in points], **style)
    row[1].plot(loads, [p.tokens_per_s for p in points], **style)
    row[2].plot(loads, [p.budget for p in points], **style)
    rated = [p for p in points if p.ratio is not None]
    row[3].plot([p.load for p in rated], [p.ratio for p in rated], **style)


def _label(row: Sequence[Any], panel: str, load: str) -> None:
    row[0].set(
        title=f"{panel}: aggregate against per-user speed", xlabel="tokens/s of a user", ylabel="tokens/s of all"
    )
    row[1].set(title=f"{panel}: throughput", xlabel=load, ylabel="tokens/s", xscale="log")
    row[2].set(
        title=f"{panel}: verify budget", xlabel=load, ylabel="tokens verified per request and step", xscale="log"
    )
    row[3].set(title=f"{panel}: against the best fixed arm", xlabel=load, ylabel="ratio", xscale="log")
    row[3].axhline(1.0, color="grey", linewidth=0.8)
    row[3].axhline(0.98, color="grey", linewidth=0.8, linestyle=":")


def _draw_ramp(row: Sequence[Any], ramp: Ramp, style: dict[str, Any]) -> None:
    style = {**style, "marker": ""}
    row[0].plot(ramp.seconds, ramp.live, **style)
    row[1].plot(ramp.seconds, ramp.tokens_per_s, **style)
    row[2].plot(ramp.seconds, ramp.budget, **style)
    row[3].plot(ramp.live, ramp.budget, **{**style, "linestyle": "", "marker": "."})


def _label_ramp(row: Sequence[Any], panel: str) -> None:
    row[0].set(title=f"{panel}: load", xlabel="s", ylabel="requests decoding")
    row[1].set(title=f"{panel}: throughput", xlabel="s", ylabel="tokens/s")
    row[2].set(title=f"{panel}: verify budget", xlabel="s", ylabel="tokens verified per request and step")
    row[3].set(title=f"{panel}: verify budget by load", xlabel="requests decoding", ylabel="tokens", xscale="log")


def _style(planner: str, number: int) -> dict[str, Any]:
    """The fixed arms thin, ours thick."""
    style: dict[str, Any] = {"label": planner, "color": f"C{number % 10}", "marker": "."}
    if planner == "off":
        return {**style, "linestyle": "--"}
    if planner.startswith(("fixed:", "threshold:")):
        return {**style, "linewidth": 1.0}
    return {**style, "linewidth": 2.5, "marker": "o"}
