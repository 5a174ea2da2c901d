"""`dspark simulate`: planners on a simulated machine under load. A table as it goes, then one JSON line; a picture on demand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.admit import parse_planner
from scheduler.curves import LAWS, find_law, scaled
from scheduler.errors import SettingsError
from scheduler.simulate import Machine, Noise, Simulation, Window, window_of
from scheduler.simulate_load import Clients, Load, parse_load
from scheduler.simulate_planning import PlanningCost, planning_cost
from scheduler.simulate_report import Outcome, Step, is_fixed, regrets
from scheduler.simulate_traces import WORKLOADS, find_traces
from services.bench.pictures import Point, Ramp, draw

_KNOWLEDGE = ("measured", "exact", "none")
_ANSWERS = 400
_MOST_PLANNED = 16384
_PARTS = tuple(field.name for field in fields(PlanningCost) if field.name != "num_requests")


@dataclass(frozen=True, slots=True)
class Study:
    """curve: a named law or a curve file. known: what the scheduler is told of it; curve_error multiplies the verify seconds
    that it is told. noise: spread of each call; outliers: share of calls that take ten times as long. seconds: virtual, 0
    derives them.
    """

    curve: str = "gpu"
    planners: tuple[str, ...] = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:7", "algorithm1", "auto")
    loads: tuple[str, ...] = ("1", "4", "16", "64", "256")
    workloads: tuple[str, ...] = ("mixed",)
    known: str = "measured"
    curve_error: float = 1.0
    noise: float = 0.0
    outliers: float = 0.0
    width: int = 7
    seconds: float = 0.0
    seed: int = 0
    pipeline_depth: int = 1

    def check(self) -> None:
        """Raises SettingsError for what cannot be simulated, before anything is."""
        find_law(self.curve)
        for planner in self.planners:
            parse_planner(planner)
        for load in self.loads:
            parse_load(load, seconds=1.0, seed=self.seed)
        for workload in self.workloads:
            find_traces(workload, seed=self.seed, width=self.width)
        if self.known not in _KNOWLEDGE:
            raise SettingsError(f"--known {self.known!r}: use one of {', '.join(_KNOWLEDGE)}")
        for flag, value, least in (("curve-error", self.curve_error, 1e-3), ("noise", self.noise, 0.0)):
            if not least <= value <= 1e3:
                raise SettingsError(f"--{flag} {value}: use a number from {least:g} to 1000")
        if not 0.0 <= self.outliers <= 1.0:
            raise SettingsError(f"--outliers {self.outliers}: use a share from 0 to 1")
        if not 1 <= self.width <= 64:
            raise SettingsError(f"--width {self.width}: use 1 to 64 tokens per draft")
        if self.pipeline_depth not in (1, 2):
            raise SettingsError(f"--pipeline-depth {self.pipeline_depth}: use 1 or 2")
        if not self.seconds >= 0.0:
            raise SettingsError(f"--seconds {self.seconds}: use a positive number, or 0 to derive it")

    def machine(self) -> Machine:
        law = find_law(self.curve)
        noise = Noise(self.noise, self.outliers)
        believed = scaled(law, verify=self.curve_error) if self.curve_error != 1.0 else None
        return Machine(law, noise, self.known, believed=believed, pipeline_depth=self.pipeline_depth)

    def load(self, text: str, machine: Machine) -> tuple[Load, Window]:
        load = parse_load(text, seconds=1.0, seed=self.seed)
        if isinstance(load, Clients):
            window = window_of(machine, clients=load.most)
        else:
            rate = float(text.partition(":")[2])
            window = Window(0.2 * _ANSWERS / rate, _ANSWERS / rate)
        if self.seconds:
            window = Window(0.2 * self.seconds, self.seconds)
        if "-" in text:
            window = Window(0.0, window.end_s)
        return parse_load(text, seconds=window.end_s, seed=self.seed), window


@dataclass(frozen=True, slots=True)
class Cell:
    """Every planner at one workload and load."""

    workload: str
    load: str
    outcomes: dict[str, Outcome]


def add_simulate(commands: Any) -> None:
    """The command's flags, for services/cli.py."""
    text = "Compare planners on a simulated machine: no model, virtual time."
    command = commands.add_parser("simulate", help=text, description=text)
    command.set_defaults(run=_simulate)
    default = Study()
    names = ", ".join(WORKLOADS)
    command.add_argument(
        "--curve", default=default.curve, help=f"{', '.join(LAWS)} or a curve file (default %(default)s)"
    )
    command.add_argument("--planners", default=",".join(default.planners), help="comma-separated (default %(default)s)")
    command.add_argument(
        "--loads",
        default=",".join(default.loads),
        help="comma-separated: clients (16), ramps (1-64-1), arrivals per second (poisson:20) (default %(default)s)",
    )
    command.add_argument(
        "--workloads",
        default=",".join(default.workloads),
        help=f"comma-separated: {names} or a .jsonl file of recorded traces",
    )
    command.add_argument(
        "--known", default=default.known, help="what the scheduler knows of the curve: measured, exact, none"
    )
    command.add_argument("--curve-error", type=float, default=1.0, help="factor on the verify seconds that it is told")
    command.add_argument("--noise", type=float, default=0.0, help="spread of the time of each call: 0.1 is about 10 %%")
    command.add_argument("--outliers", type=float, default=0.0, help="share of calls that take ten times as long")
    command.add_argument("--width", type=int, default=default.width, help="tokens per draft (default %(default)s)")
    command.add_argument("--seconds", type=float, default=0.0, help="virtual seconds counted; 0 derives them")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--pipeline-depth", type=int, default=1, help="2: the drafter has a device of its own (default %(default)s)"
    )
    command.add_argument(
        "--planning", metavar="256,4096", help="only time the planning of so many live requests, in real seconds"
    )
    command.add_argument("--plot", metavar="FILE.png", help="draw speed, throughput, verify budget and regret")


def _simulate(args: argparse.Namespace) -> None:
    study = Study(
        curve=args.curve,
        planners=tuple(args.planners.split(",")),
        loads=tuple(args.loads.split(",")),
        workloads=tuple(args.workloads.split(",")),
        known=args.known,
        curve_error=args.curve_error,
        noise=args.noise,
        outliers=args.outliers,
        width=args.width,
        seconds=args.seconds,
        seed=args.seed,
        pipeline_depth=args.pipeline_depth,
    )
    if args.planning is not None:
        time_planning(study, args.planning)
    else:
        simulate(study, plot=args.plot)


def time_planning(study: Study, sizes: str) -> None:
    """A table and a JSON line: what the adaptive planners of the study take to decide a step."""
    counts = [int(size) if size.isascii() and size.isdigit() else 0 for size in sizes.split(",")]
    if not all(1 <= count <= _MOST_PLANNED for count in counts):
        raise SettingsError(f"--planning {sizes!r}: write numbers of live requests, 1 to {_MOST_PLANNED} (256,4096)")
    study.check()
    law = find_law(study.curve)
    planners = [p for p in study.planners if parse_planner(p).adaptive]
    costs = [(planner, planning_cost(law, planner, count)) for planner in planners for count in counts]
    print(_planning_row(("planner", "live", "plan", *_PARTS)))
    for planner, cost in costs:
        milliseconds = (f"{1000 * seconds:.3f}" for seconds in (cost.plan, *(getattr(cost, part) for part in _PARTS)))
        print(_planning_row((planner, cost.num_requests, *milliseconds)))
    print(
        "ms, the least of several: plan is judge (rates, calibration, survivals), price (the curve at every size), outlook\n"
        "and admit; choose (who drafts) is kept for some steps; remember and observe are for later steps"
    )
    rows = [{"planner": planner, "plan_s": cost.plan, **asdict(cost)} for planner, cost in costs]
    print(json.dumps({"planning": study.curve, "rows": rows}))


def _planning_row(values: Sequence[object]) -> str:
    return f"{values[0]!s:<12}" + "".join(f"{value!s:>10}" for value in values[1:])


def simulate(study: Study, *, plot: str | None) -> None:
    study.check()
    print(_row(_COLUMNS), flush=True)
    cells = []
    for workload in study.workloads:
        for load in study.loads:
            cells.append(run_cell(study, workload, load))
            for line in lines(cells[-1]):
                print(line, flush=True)
    print(_LEGEND)
    if plot:
        draw(points(cells), plot, f"simulated: {study.curve}", ramps=ramps(cells))
        print(f"plot: {plot}")
    print(json.dumps({"simulate": study.curve, "seed": study.seed, "known": study.known, "rows": rows(cells)}))


def run_cell(study: Study, workload: str, load: str) -> Cell:
    machine = study.machine()
    outcomes = {}
    for planner in study.planners:
        arrivals, window = study.load(load, machine)
        traces = find_traces(workload, seed=study.seed, width=study.width)
        outcomes[planner] = Simulation(machine, planner, traces, arrivals, seed=study.seed).run(window)
    return Cell(workload, load, outcomes)


def points(cells: Sequence[Cell]) -> list[Point]:
    """Of the steady loads; open and closed loops are panels of their own."""
    return [
        Point(
            f"{cell.workload}, open loop" if "poisson" in cell.load else cell.workload,
            planner,
            float(cell.load.removeprefix("poisson:")),
            o.tokens_per_s,
            o.user_tokens_per_s,
            o.budget,
            ratios.get(planner),
        )
        for cell in cells
        if "-" not in cell.load
        for ratios in (regrets(cell.outcomes),)
        for planner, o in cell.outcomes.items()
    ]


def ramps(cells: Sequence[Cell]) -> dict[str, dict[str, Ramp]]:
    """By panel and planner, how things went while the load rose and fell."""
    return {
        f"{cell.workload} {cell.load}": {planner: _ramp(o.history) for planner, o in cell.outcomes.items()}
        for cell in cells
        if "-" in cell.load
    }


def _ramp(history: Sequence[Step], num_bins: int = 40) -> Ramp:
    edges = np.linspace(0.0, history[-1].now if history else 1.0, num_bins + 1)
    at = [step.now for step in history]

    def total(values: Sequence[int]) -> npt.NDArray[np.float64]:
        return np.histogram(at, edges, weights=values)[0]

    rounds = total([step.num_rounds for step in history])
    busy = rounds > 0
    return Ramp(
        seconds=edges[1:][busy].tolist(),
        live=(rounds[busy] / total([int(step.num_rounds > 0) for step in history])[busy]).tolist(),
        tokens_per_s=(total([step.num_round_tokens for step in history]) / np.diff(edges))[busy].tolist(),
        budget=(1 + total([step.num_verified for step in history])[busy] / rounds[busy]).tolist(),
    )


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {"workload": cell.workload, "load": cell.load, "ratio": _rounded(ratios.get(planner)), **outcome.numbers()}
        for cell in cells
        for ratios in (regrets(cell.outcomes),)
        for planner, outcome in cell.outcomes.items()
    ]


_COLUMNS = (
    "workload",
    "load",
    "planner",
    "tok/s",
    "ratio",
    "user/s",
    "ttft50",
    "ttft99",
    "tpot50",
    "accept",
    "budget",
    "gate",
    "plan",
)
_LEGEND = (
    "ratio: to the best fixed arm (off, fixed:k); accept: tokens per round, the target's own included; budget: tokens\n"
    "verified per round, likewise; times in ms; gate: share of the steps in which nobody drafts because it does not pay;\n"
    "plan: real ms of planning a step here"
)


def lines(cell: Cell) -> list[str]:
    ratios = regrets(cell.outcomes)
    return [_row(_values(cell, planner, outcome, ratios)) for planner, outcome in cell.outcomes.items()]


def _values(cell: Cell, planner: str, outcome: Outcome, ratios: dict[str, float]) -> Sequence[object]:
    return (
        cell.workload,
        cell.load,
        planner,
        f"{outcome.tokens_per_s:.1f}",
        f"{ratios[planner]:.3f}" if planner in ratios else "",
        f"{outcome.user_tokens_per_s:.1f}",
        f"{1000 * outcome.ttft_s[0]:.1f}",
        f"{1000 * outcome.ttft_s[1]:.1f}",
        f"{1000 * outcome.tpot_s[0]:.2f}",
        f"{outcome.accept_length:.2f}",
        f"{outcome.budget:.2f}",
        "" if is_fixed(planner) else f"{outcome.gate.get('shut', 0.0):.2f}",
        f"{1000 * outcome.plan_wall_s:.2f}",
    )


def _row(values: Sequence[object]) -> str:
    first, second, third, *rest = values
    return f"{first!s:<16}{second!s:<13}{third!s:<14}" + "".join(f"{value!s:>9}" for value in rest)


def _rounded(ratio: float | None) -> float | None:
    return round(ratio, 4) if ratio is not None else None
