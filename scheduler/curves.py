"""What steps truly cost on the machines that the simulator pretends to be: named cost laws, and laws from measured curves.

Must not know requests, planners or acceptance.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.errors import SettingsError
from scheduler.throughput import CostCurve, CurvePoints, CurveRejected, check_points

FREE = 1e-7
"""Seconds of a draft that costs nothing; a measured time is never 0."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a verify step costs by. kv_rows: rows read, once per request. attended: rows before each token, summed."""

    num_tokens: int
    num_requests: int
    kv_rows: int
    attended: int

    @property
    def context_len(self) -> float:
        return self.attended / max(1, self.num_tokens)


@dataclass(frozen=True, slots=True)
class CostLaw:
    """The truth about a machine, seconds each. verify_s of a step; draft_s of (requests, width).

    host_s of (live requests): work outside the models, in every step. absorb_token_s: what keeping the drafter's context
    costs per committed token while anybody may draft. prefill_chunk: the scheduler's setting that suits the machine.
    """

    name: str
    verify_s: Callable[[StepWork], float]
    draft_s: Callable[[int, int], float]
    host_s: Callable[[int], float] = lambda live: 0.0
    absorb_token_s: float = 0.0
    prefill_chunk: int = 256


def constant(step_s: float = 0.01, draft_s: float = FREE) -> CostLaw:
    """Every step takes the same time, every draft too."""
    return CostLaw("constant", lambda work: step_s, lambda requests, width: draft_s if requests and width else 0.0)


def linear(fixed_s: float = 0.01, token_s: float = 0.001, draft_s: float = 0.002) -> CostLaw:
    return CostLaw(
        "linear",
        lambda work: fixed_s + token_s * work.num_tokens,
        lambda requests, width: draft_s if requests and width else 0.0,
    )


def stairs(first_s: float = 0.01, tread: int = 4, rise: float = 0.5) -> CostLaw:
    """1 / SPS(B) = first_s * (1 + rise * (ceil(B / tread) - 1)): the reference's staircase (1.8), drafts free."""
    return CostLaw(
        "stairs",
        lambda work: first_s * (1.0 + rise * (math.ceil(work.num_tokens / tread) - 1)),
        lambda requests, width: FREE if requests and width else 0.0,
    )


def gpu() -> CostLaw:
    """An 8B model on a data-centre GPU: weights read in 5 ms, free up to a tile, then padded to captured batch sizes; beyond
    the knee each wave of 128 rows costs its products; KV is read once per request at 3 TB/s, 128 KiB a row."""
    return CostLaw("gpu", _gpu_verify_s, _gpu_draft_s, lambda live: 2e-4 + 1e-6 * live, 2e-7, 2048)


def _gpu_verify_s(work: StepWork) -> float:
    padded = 8 * math.ceil(work.num_tokens / 8) if work.num_tokens <= 128 else 128 * math.ceil(work.num_tokens / 128)
    waves = math.ceil(padded / 128)
    products_s = max(5e-3, 2.4e-3 * waves)
    return 6e-4 + products_s + 1.5e-6 * padded + 4.4e-8 * work.kv_rows


def _gpu_draft_s(requests: int, width: int) -> float:
    """A backbone of a fifth of the layers over γ rows a request, then γ small sequential steps."""
    if not requests or not width:
        return 0.0
    waves = math.ceil(requests * width / 128)
    return 4e-4 + max(2.5e-4, 1.2e-4 * waves) + 5e-5 * width


def cpu() -> CostLaw:
    """The 135M demo model and its drafter on two cores with bfloat16 products, as `dspark measure` found them."""
    return law_of_curve("cpu", CostCurve(_CPU, 0.0), host_s=lambda live: 3e-4 + 3e-5 * live, absorb_token_s=1.3e-5)


_CPU = CurvePoints(
    tokens=(1, 8, 16, 32, 64, 128, 256),
    contexts=(256, 1024),
    verify_s=(
        (0.0140, 0.0150, 0.0190, 0.0290, 0.0570, 0.1100, 0.2150),
        (0.0143, 0.0165, 0.0222, 0.0357, 0.0705, 0.1367, 0.2490),
    ),
    requests=(1, 4, 16, 32),
    widths=(1, 2, 4, 7),
    draft_s=(
        (0.0030, 0.0033, 0.0039, 0.0050),
        (0.0040, 0.0048, 0.0064, 0.0090),
        (0.0080, 0.0110, 0.0170, 0.0260),
        (0.0140, 0.0197, 0.0310, 0.0480),
    ),
    kv_token_s=1.8e-6,
)

LAWS: dict[str, Callable[[], CostLaw]] = {
    "gpu": gpu,
    "cpu": cpu,
    "stairs": stairs,
    "linear": linear,
    "constant": constant,
}


def find_law(name: str) -> CostLaw:
    """A named law, or that of a curve file; raises SettingsError."""
    if name in LAWS:
        return LAWS[name]()
    path = Path(name)
    if not path.suffix and not path.exists():
        raise SettingsError(f"curve {name!r} is neither a file nor one of {', '.join(LAWS)}")
    return law_of_curve(path.stem, read_curve(path))


def read_curve(path: str | os.PathLike[str]) -> CostCurve:
    """The points of a curve that a server saved, or of the last line of `dspark measure`; raises SettingsError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
        except ValueError:
            document = json.loads(text.strip().splitlines()[-1])
        points = _points(document.get("points", document))
        check_points(points, width=points.widths[-1] if points.widths else 0)
    except OSError as error:
        raise SettingsError(f"curve {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, CurveRejected) as error:
        raise SettingsError(f"curve {path} is not a cost curve: {type(error).__name__} {error}") from None
    return CostCurve(points, 0.0, from_file=True)


def _points(raw: dict[str, Any]) -> CurvePoints:
    def rows(name: str) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(seconds) for seconds in row) for row in raw[name])

    return CurvePoints(
        tokens=tuple(raw["tokens"]),
        contexts=tuple(raw["contexts"]),
        verify_s=rows("verify_s"),
        requests=tuple(raw["requests"]),
        widths=tuple(raw["widths"]),
        draft_s=rows("draft_s"),
        kv_token_s=float(raw.get("kv_token_s", 0.0)),
    )


def law_of_curve(
    name: str,
    curve: CostCurve,
    *,
    host_s: Callable[[int], float] = lambda live: 0.0,
    absorb_token_s: float = 0.0,
) -> CostLaw:
    """The machine that is exactly as the curve says."""
    return CostLaw(
        name,
        lambda work: float(curve.verify_seconds(work.num_tokens, 1, work.context_len, work.kv_rows)[0]),
        curve.draft_seconds,
        host_s,
        absorb_token_s,
    )


def scaled(law: CostLaw, *, verify: float = 1.0, draft: float = 1.0) -> CostLaw:
    """A machine whose models take so many times as long."""
    return replace(
        law,
        verify_s=lambda work: verify * law.verify_s(work),
        draft_s=lambda requests, width: draft * law.draft_s(requests, width),
    )
