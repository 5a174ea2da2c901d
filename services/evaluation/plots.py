"""Drawings of an evaluation as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from drafter.reliability import cumulative_survival, reliability_bins
from drafter.rounds import Floats, Rounds
from scheduler.errors import SettingsError


@dataclass(frozen=True, slots=True)
class ReliabilityPanel:
    """before, after: [N, γ] confidences of the rounds' drafts."""

    title: str
    rounds: Rounds
    before: Floats
    after: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]


def require_matplotlib(flag: str) -> None:
    """Raises SettingsError before hours of work, not after."""
    if find_spec("matplotlib") is None:
        raise SettingsError(f"{flag} needs matplotlib: pip install matplotlib")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_reliability(panels: Sequence[ReliabilityPanel], path: str) -> None:
    """Predicted prefix survival against what happened, a column per panel: before calibration above, after below."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, len(panels), figsize=(4 * len(panels), 7.5), layout="constrained", squeeze=False)
    for column, panel in enumerate(panels):
        for row, (name, confidence) in enumerate((("before", panel.before), ("after", panel.after))):
            _reliability(axes[row][column], panel.rounds, cumulative_survival(confidence))
            axes[row][column].set(title=f"{panel.title}, {name}", xlabel="stated survival", ylabel="survived")
    axes[0][0].legend(fontsize=8, title="draft")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _reliability(axis: Any, rounds: Rounds, predicted: Floats) -> None:
    axis.plot([0, 1], [0, 1], "k--", linewidth=0.8)
    for k in range(rounds.width):
        rows = rounds.proposed > k
        bins = reliability_bins(predicted[rows, k], rounds.accepted[rows] > k)
        # a handful of rounds says nothing about a rate
        some = bins.count >= 20
        axis.plot(bins.predicted[some], bins.observed[some], marker=".", linewidth=0.9, label=str(k + 1))


def draw_curves(panels: Mapping[str, Sequence[Curve]], path: str, *, xlabel: str, ylabel: str) -> None:
    """A panel per title, side by side, on one scale."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False, sharey=True
    )
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for curve in curves:
            known = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
            axis.plot([x for x, _ in known], [y for _, y in known], marker=".", label=curve.label)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
