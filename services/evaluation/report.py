"""An evaluation as report.md with plots, results.json and one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.reliability import Fit, fit_of
from drafter.rounds import accepted_length, conditional_acceptance, joined, survival, verified_per_round
from services.evaluation.findings import Cell, EvaluateSpec, Evaluation
from services.evaluation.plots import Curve, ReliabilityPanel, draw_curves, draw_reliability
from services.whole_file import write_whole

MACRO = "macro average"
COUNTING = """Accepted length: tokens emitted per verify round, the target's own (bonus) token included; plain decoding is 1.
The first token of an answer is no round. A round that a stop id ends inside the accepted drafts emits up to and with it, without
a bonus; a last round that the token limit cuts short is left out. Survival of draft k: share of the rounds in which drafts 1..k
were all accepted. Conditional acceptance: share in which draft k was accepted, of the rounds in which those before it were. Macro
average: the mean over data sets, each counting alike. Calibration: prefix survival as stated (cumulative product of the
confidences) against what happened; ECE with 20 bins, AUC, Brier: means over positions weighted by rounds."""

Number = float | None


def write_report(evaluation: Evaluation, spec: EvaluateSpec) -> None:
    out = Path(spec.out)
    plots = _draw(evaluation, out)
    text = markdown(evaluation, spec, plots)
    line = json.dumps({"evaluate": evaluation.model, **results(evaluation)})
    write_whole(out / "report.md", text)
    write_whole(out / "results.json", line + "\n")
    print(text)
    print(f"written: {out / 'report.md'}, {', '.join(plots)}")
    print(line)


# --- numbers


def mean(values: Iterable[Number]) -> Number:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_by_position(lists: Sequence[Sequence[Number]]) -> list[Number]:
    return [mean(column) for column in zip(*lists, strict=True)]


def results(evaluation: Evaluation) -> dict[str, Any]:
    groups = _groups(evaluation)
    return {
        "cells": [_cell_numbers(cell) for cell in evaluation.cells],
        "macro": [
            {
                "drafter": drafter,
                "temperature": temperature,
                "accepted_length": _round(mean(accepted_length(cell.rounds) for cell in cells)),
                "conditional": _rounded(mean_by_position([conditional_acceptance(c.rounds) for c in cells])),
                "survival": _rounded(mean_by_position([survival(cell.rounds) for cell in cells])),
                "ece_before": _round(mean(_error(cell.before) for cell in cells)),
                "ece_after": _round(mean(_error(cell.after) for cell in cells)),
                "ece_of_all_rounds": _rounded(pooled_errors(cells)),
            }
            for (drafter, temperature), cells in groups.items()
        ],
        "sweeps": [
            {
                "drafter": drafter,
                "temperature": temperature,
                "thresholds": [point.threshold for point in points],
                "accepted_length": [_round(point.accepted_length) for point in points],
                "verified": [_round(point.verified) for point in points],
            }
            for (drafter, temperature), points in evaluation.sweeps.items()
        ],
    }


def _cell_numbers(cell: Cell) -> dict[str, Any]:
    return {
        "drafter": cell.drafter,
        "dataset": cell.dataset,
        "temperature": cell.temperature,
        "prompts": cell.num_prompts,
        "too_long": cell.num_too_long,
        "rounds": len(cell.rounds),
        "accepted_length": _round(accepted_length(cell.rounds)),
        "verified": _round(verified_per_round(cell.rounds)),
        "conditional": _rounded(conditional_acceptance(cell.rounds)),
        "survival": _rounded(survival(cell.rounds)),
        "before": cell.before.facts() if cell.before else None,
        "after": cell.after.facts() if cell.after else None,
        "equality": cell.equality.facts() if cell.equality else None,
    }


def _groups(evaluation: Evaluation) -> dict[tuple[str, float], list[Cell]]:
    groups: dict[tuple[str, float], list[Cell]] = {}
    for cell in evaluation.cells:
        groups.setdefault((cell.drafter, cell.temperature), []).append(cell)
    return groups


def pooled_errors(cells: Sequence[Cell]) -> tuple[Number, Number]:
    """ECE before and after over the rounds of all data sets: with few rounds each, a data set's own is mostly chance."""
    rounds = joined([cell.rounds for cell in cells])
    stated = [np.concatenate([cell.raw for cell in cells]), np.concatenate([cell.calibrated for cell in cells])]
    known = [all(cell.before for cell in cells), all(cell.after for cell in cells)]
    before, after = (fit_of(c, rounds).ece if k else None for c, k in zip(stated, known, strict=True))
    return before, after


def _error(fit: Fit | None) -> Number:
    return fit.ece if fit else None


def _round(value: Number) -> Number:
    return None if value is None else round(value, 4)


def _rounded(values: Iterable[Number]) -> list[Number]:
    return [_round(value) for value in values]


# --- text


def markdown(evaluation: Evaluation, spec: EvaluateSpec, plots: Sequence[str]) -> str:
    turns = "all turns" if spec.num_turns == 0 else f"{spec.num_turns} turn(s) a prompt"
    parts = [
        f"# Drafters of {evaluation.model}",
        f"{spec.max_tokens} tokens an answer at most, {turns}, seed {spec.seed}.",
        COUNTING,
        "## Accepted length",
        _lengths(evaluation),
        "## Conditional acceptance by position, macro average",
        _by_position(evaluation, lambda cell: conditional_acceptance(cell.rounds)),
        "## Survival by position, macro average",
        _by_position(evaluation, lambda cell: survival(cell.rounds)),
        "## Calibration of prefix survival",
        _calibration(evaluation),
    ]
    if evaluation.sweeps:
        parts += [
            "## Thresholds",
            f"Drafts are verified up to the first confidence below the threshold; {spec.sweep_prompts} prompts of each data set.",
            _thresholds(evaluation),
        ]
    if any(cell.equality for cell in evaluation.cells):
        parts += ["## Is the text the target's?", _equality(evaluation)]
    parts += [f"![{Path(plot).stem}]({Path(plot).name})" for plot in plots]
    return "\n\n".join(parts) + "\n"


def _lengths(evaluation: Evaluation) -> str:
    """A column per drafter and temperature, and how often the first drafter's length another one's is."""
    groups = _groups(evaluation)
    first = evaluation.cells[0].drafter
    datasets = list(dict.fromkeys(cell.dataset for cell in evaluation.cells))
    rows = []
    for row, name in enumerate((*datasets, MACRO)):
        cells = [name]
        for (drafter, temperature), group in groups.items():
            length = _length(group, row)
            cells.append(f"{length:.2f}")
            if drafter != first:
                cells.append(f"{_length(groups[first, temperature], row) / length:.2f}")
        rows.append(cells)
    header = ["data set"]
    for drafter, temperature in groups:
        header.append(_title(drafter, temperature))
        if drafter != first:
            header.append(f"{first} / {drafter}, T {temperature:g}")
    return _table(header, rows)


def _length(cells: Sequence[Cell], row: int) -> float:
    """Of one data set, or, one row further, their mean."""
    lengths = [accepted_length(cell.rounds) for cell in cells]
    return lengths[row] if row < len(lengths) else sum(lengths) / len(lengths)


def _by_position(evaluation: Evaluation, values: Callable[[Cell], Sequence[Number]]) -> str:
    rows = [
        [_title(*key), *(_number(x) for x in mean_by_position([values(cell) for cell in cells]))]
        for key, cells in _groups(evaluation).items()
    ]
    width = max(len(row) for row in rows) - 1
    return _table(["drafter", *map(str, range(1, width + 1))], [row + [""] * (width + 1 - len(row)) for row in rows])


def _calibration(evaluation: Evaluation) -> str:
    rows = []
    for key, cells in _groups(evaluation).items():
        if all(cell.before is None for cell in cells):
            rows.append([_title(*key), "states no confidence", *[""] * 6])
            continue
        for cell in cells:
            ranks = [fit.auc if fit else None for fit in (cell.before, cell.after)]
            scores = [fit.brier if fit else None for fit in (cell.before, cell.after)]
            errors = [_error(cell.before), _error(cell.after)]
            rows.append([_title(*key), cell.dataset, *map(_percent, errors), *map(_number, (*ranks, *scores))])
        macro = [mean(_error(cell.before) for cell in cells), mean(_error(cell.after) for cell in cells)]
        rows.append([_title(*key), MACRO, *map(_percent, macro), *[""] * 4])
        rows.append([_title(*key), "all rounds as one", *map(_percent, pooled_errors(cells)), *[""] * 4])
    names = ("ECE", "ECE calibrated", "AUC", "AUC calibrated", "Brier", "Brier calibrated")
    return _table(["drafter", "data set", *names], rows)


def _thresholds(evaluation: Evaluation) -> str:
    rows = [
        [_title(*key), f"{point.threshold:g}", f"{point.accepted_length:.2f}", f"{point.verified:.2f}"]
        for key, points in evaluation.sweeps.items()
        for point in points
    ]
    return _table(["drafter", "threshold", "accepted length", "drafts verified a round"], rows)


def _equality(evaluation: Evaluation) -> str:
    rows = []
    for cell in evaluation.cells:
        if cell.equality is not None:
            facts = cell.equality.facts()
            names = ("compared", "equal", "near_ties", "wrong", "largest_gap")
            rows.append([_title(cell.drafter, cell.temperature), cell.dataset, *(str(facts[name]) for name in names)])
    return _table(["drafter", "data set", "answers", "equal", "near-ties", "wrong", "largest gap (logits)"], rows)


def _title(drafter: str, temperature: float) -> str:
    return f"{drafter}, T {temperature:g}"


def _number(value: Number) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: Number) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- plots


def _draw(evaluation: Evaluation, out: Path) -> list[str]:
    groups = _groups(evaluation)
    plots = [str(out / "acceptance.png")]
    draw_curves(
        _panels(groups, lambda cells: mean_by_position([conditional_acceptance(cell.rounds) for cell in cells])),
        plots[0],
        xlabel="draft position",
        ylabel="conditional acceptance",
    )
    panels = [_reliability(key, cells) for key, cells in groups.items() if all(cell.before for cell in cells)]
    if panels:
        plots.append(str(out / "reliability.png"))
        draw_reliability(panels, plots[-1])
    if evaluation.sweeps:
        plots.append(str(out / "thresholds.png"))
        curves: dict[str, list[Curve]] = {}
        for (drafter, temperature), points in evaluation.sweeps.items():
            curve = Curve(drafter, [p.verified for p in points], [p.accepted_length for p in points])
            curves.setdefault(f"temperature {temperature:g}", []).append(curve)
        draw_curves(curves, plots[-1], xlabel="drafts verified a round", ylabel="accepted length")
    return plots


def _panels(
    groups: dict[tuple[str, float], list[Cell]], values: Callable[[list[Cell]], Sequence[Number]]
) -> dict[str, list[Curve]]:
    panels: dict[str, list[Curve]] = {}
    for (drafter, temperature), cells in groups.items():
        y = values(cells)
        panels.setdefault(f"temperature {temperature:g}", []).append(Curve(drafter, range(1, len(y) + 1), y))
    return panels


def _reliability(key: tuple[str, float], cells: Sequence[Cell]) -> ReliabilityPanel:
    return ReliabilityPanel(
        _title(*key),
        joined([cell.rounds for cell in cells]),
        np.concatenate([cell.raw for cell in cells]),
        np.concatenate([cell.calibrated for cell in cells]),
    )
