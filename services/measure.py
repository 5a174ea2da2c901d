"""`dspark measure`: how long steps of the models take here. The planner's cost curve as a table, a plot and a JSON line;
beside it what the matrix products alone take, and the share of a step that is our own work around the models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.errors import Failed
from scheduler.stats import SchedulerStats
from scheduler.throughput import CostCurve, CurvePoints
from scheduler.wire import Request, SamplingParams
from services.engine import Engine, Workers, curve_path, machine_key
from services.settings import Settings
from services.workers import launch_colocated

Seconds = Sequence[float]

_PRODUCT_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_HOST_LOADS = (1, 32)
_HOST_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Measured:
    """products_s: seconds of all matrix products of a step, by number of tokens, and the whole step measured beside it.
    host_share: our own seconds over all seconds of a step, by number of live requests."""

    points: CurvePoints
    products_s: dict[int, float]
    steps_s: dict[int, float]
    host_share: dict[int, float]


def measure(settings: Settings, *, plot: str | None) -> None:
    measured, machine = asyncio.run(_measure(settings))
    print("\n".join(table(measured)))
    if plot:
        draw(measured, plot, settings.model_name)
        print(f"plot: {plot}")
    print(json.dumps(report(measured, settings, machine)))


async def _measure(settings: Settings) -> tuple[Measured, dict[str, str]]:
    """Measures anew and leaves the curve where the next start of a server finds it."""
    machine = machine_key(settings)
    path = curve_path(settings, machine)
    path.unlink(missing_ok=True)
    engine = Engine(settings, launch_colocated)
    try:
        await engine.start()
        if not path.is_file():
            raise Failed(_why_no_curve(await engine.snapshot(), path))
        products, steps = await _products(engine.workers)
        host = {load: await _host_share(engine, load) for load in _HOST_LOADS if load <= settings.scheduler.max_live}
    finally:
        await engine.stop()
    return Measured(_saved_points(path), products, steps, host), machine


def _why_no_curve(stats: SchedulerStats, path: Path) -> str:
    if stats.curve_loaded:
        return f"cache_dir: the cost curve was measured and cannot be saved to {path}; set another one"
    return f"the cost curve could not be measured: {stats.trim_off_reason}"


def _saved_points(path: Path) -> CurvePoints:
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    return CurvePoints(**{name: _tuples(value) for name, value in points.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


async def _products(workers: Workers, repeats: int = 3) -> tuple[dict[int, float], dict[int, float]]:
    """Products and whole steps in turn, so that a busy moment of the machine meets both."""
    measure_products = getattr(workers.verifier, "measure_products", None)
    if measure_products is None:
        return {}, {}
    products: list[list[float]] = []
    steps: list[list[float]] = []
    for _ in range(repeats):
        products.append(await measure_products(_PRODUCT_TOKENS))
        steps.append((await workers.verifier.measure(_PRODUCT_TOKENS, (64,)))[0])
    return _medians(products), _medians(steps)


def _medians(runs: Sequence[Sequence[float]]) -> dict[int, float]:
    return {n: statistics.median(column) for n, column in zip(_PRODUCT_TOKENS, zip(*runs, strict=True), strict=True)}


async def _host_share(engine: Engine, num_requests: int) -> float:
    """Seconds in plan and apply over all seconds of the steps, while `num_requests` greedy requests run."""
    before = await engine.snapshot()
    await run_requests(engine, num_requests, _HOST_TOKENS)
    after = await engine.snapshot()
    host = _difference(after, before, "plan_s") + _difference(after, before, "apply_s")
    models = _difference(after, before, "draft_s") + _difference(after, before, "verify_s")
    return host / (host + models)


def _difference(after: SchedulerStats, before: SchedulerStats, name: str) -> float:
    return getattr(after, name) - getattr(before, name)


async def run_requests(engine: Engine, num_requests: int, num_tokens: int) -> None:
    """Runs that many requests at once to their end, without text."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    vocab_size = (await engine.workers.verifier.describe()).vocab_size
    async with contextlib.aclosing(engine.subscribe("measure")) as stream:
        await anext(stream)
        for number in range(num_requests):
            prompt = tuple((7 * number + 3 * k) % vocab_size for k in range(24))
            await engine.submit(Request(f"measure-{number}", prompt, params, "measure"))
        running = num_requests
        async for deltas in stream:
            running -= sum(delta.finish_reason is not None for delta in deltas)
            if not running:
                return


def table(measured: Measured) -> list[str]:
    points = measured.points
    lines = ["verify step, ms by tokens in it and context, as the planner reckons (raw: as timed)"]
    lines += _beside(
        "tokens",
        points.contexts,
        points.tokens,
        zip(*planned_verify(points), strict=True),
        zip(*points.verify_s, strict=True),
    )
    kv_us = 1e6 * points.kv_token_s
    lines.append(f"(a request for every 8 tokens; a cached token that another request reads takes {kv_us:.2f} us)")
    if points.requests:
        lines += ["", "draft, ms by requests and width"]
        lines += _beside("requests", points.widths, points.requests, planned_draft(points), points.draft_s)
    if measured.products_s:
        lines += ["", "whole step against its matrix products alone, ms", _row("tokens", ["step", "products", "ratio"])]
        lines += [
            _row(n, [1000 * measured.steps_s[n], 1000 * measured.products_s[n], _ratio(measured, n)])
            for n in measured.products_s
        ]
        if min(_ratio(measured, n) for n in measured.products_s) < 0.95:
            lines.append("a step cannot take less than its products: the machine was busy, measure again")
    shares = ", ".join(f"{load} requests {100 * share:.1f} %" for load, share in measured.host_share.items())
    return [*lines, "", f"host work outside the models, share of a step: {shares}"]


def planned_verify(points: CurvePoints) -> list[list[float]]:
    """[contexts][tokens] seconds that the planner uses: never fewer for more tokens or more context."""
    curve = CostCurve(points, 0.0)
    return [[float(curve.verify_seconds(n, 1, context)[0]) for n in points.tokens] for context in points.contexts]


def planned_draft(points: CurvePoints) -> list[list[float]]:
    """[requests][widths] the same for drafts."""
    curve = CostCurve(points, 0.0)
    return [[curve.draft_seconds(n, width) for width in points.widths] for n in points.requests]


def _beside(
    first: str, columns: Sequence[int], rows: Sequence[int], planned: Iterable[Seconds], raw: Iterable[Seconds]
) -> list[str]:
    """A table with two columns for each of `columns`: what the planner uses and what was timed, in ms."""
    lines = [_row(first, [name for column in columns for name in (column, "raw")])]
    for name, used, timed in zip(rows, planned, raw, strict=True):
        lines.append(_row(name, [1000 * s for pair in zip(used, timed, strict=True) for s in pair]))
    return lines


def _row(first: object, rest: Sequence[object]) -> str:
    return f"{first!s:>9}" + "".join(f"{x:>10.2f}" if isinstance(x, float) else f"{x!s:>10}" for x in rest)


def _ratio(measured: Measured, num_tokens: int) -> float:
    return measured.steps_s[num_tokens] / measured.products_s[num_tokens]


def report(measured: Measured, settings: Settings, machine: dict[str, str]) -> dict[str, Any]:
    points = measured.points
    return {
        "measure": settings.model_name,
        "machine": machine,
        "tokens": points.tokens,
        "contexts": points.contexts,
        "verify_s": _rounded(planned_verify(points)),
        "verify_raw_s": _rounded(points.verify_s),
        "requests": points.requests,
        "widths": points.widths,
        "draft_s": _rounded(planned_draft(points)),
        "draft_raw_s": _rounded(points.draft_s),
        "step_over_products": {str(n): round(_ratio(measured, n), 3) for n in measured.products_s},
        "host_share": {str(load): round(share, 4) for load, share in measured.host_share.items()},
    }


def _rounded(table: Iterable[Seconds]) -> list[list[float]]:
    return [[round(seconds, 7) for seconds in row] for row in table]


def draw(measured: Measured, path: str, title: str) -> None:
    """Lines: what the planner uses; points: what was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = measured.points
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for context, seconds, raw in zip(points.contexts, planned_verify(points), points.verify_s, strict=True):
        (line,) = left.plot(points.tokens, [1000 * s for s in seconds], label=f"context {context}")
        left.plot(points.tokens, [1000 * s for s in raw], ".", color=line.get_color())
    if measured.products_s:
        left.plot(list(measured.products_s), [1000 * s for s in measured.products_s.values()], "k--", label="products")
    left.set(title=f"{title}: verify step", xlabel="tokens in the step", ylabel="ms", xscale="log")
    left.legend()
    planned = planned_draft(points)
    for index, width in enumerate(points.widths):
        (line,) = right.plot(points.requests, [1000 * row[index] for row in planned], label=f"width {width}")
        right.plot(points.requests, [1000 * row[index] for row in points.draft_s], ".", color=line.get_color())
    right.set(title="draft", xlabel="requests", ylabel="ms", xscale="log")
    if points.widths:
        right.legend()
    figure.savefig(path, dpi=120)
