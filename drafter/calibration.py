"""Temperatures that turn confidence logits into calibrated probabilities, and their file beside the weights.

calibration.json:

    {"version": 1,
     "checkpoint": "<fingerprint of the weights they were fitted for>",
     "regimes": {"greedy": {"temperatures": [T_1, ..., T_γ]}, "sampled": {"temperatures": [...]}}}

Position k of a request in a regime has confidence sigmoid(z_k / T_k), z the logit of the confidence head. The true
acceptance of a drafter differs between greedy and sampled requests, so each regime has its own temperatures; one that is
absent is not calibrated (all 1). Unknown keys are facts of the fit and are ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.errors import SettingsError
from scheduler.wire import FloatArray, SamplingParams

FILE_NAME = "calibration.json"
VERSION = 1
REGIMES = ("greedy", "sampled")


def regime_of(params: SamplingParams) -> str:
    return "greedy" if params.greedy else "sampled"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures per regime, [γ] each, finite and above 0. checkpoint: fingerprint of the weights, empty if unknown."""

    temperatures: Mapping[str, tuple[float, ...]]
    checkpoint: str = ""

    def apply(self, logits: FloatArray, params: Sequence[SamplingParams]) -> FloatArray:
        """logits [R, w] -> confidence [R, w] in (0, 1), row by row in its request's regime."""
        divisors = np.ones(logits.shape, dtype=np.float32)
        for regime, temperatures in self.temperatures.items():
            rows = np.array([regime_of(p) == regime for p in params], dtype=bool)
            divisors[rows] = temperatures[: logits.shape[1]]
        return _sigmoid(logits / divisors)


def _sigmoid(x: FloatArray) -> FloatArray:
    """Without overflow on either side."""
    return (0.5 * (1.0 + np.tanh(0.5 * x))).astype(np.float32)


UNCALIBRATED = Calibration({})


def load_calibration(folder: Path, num_positions: int, fingerprint: str) -> Calibration:
    """The folder's calibration, or none where it has no file. Raises SettingsError naming file and field."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return UNCALIBRATED
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise SettingsError(f"{path}: version must be {VERSION}; calibrate again or remove the file")
    checkpoint = str(content.get("checkpoint") or "")
    if checkpoint and checkpoint != fingerprint:
        raise SettingsError(f"{path}: checkpoint {checkpoint} is not these weights ({fingerprint}); calibrate again")
    return Calibration(_regimes(content.get("regimes"), num_positions, path), checkpoint)


def _regimes(regimes: Any, num_positions: int, path: Path) -> dict[str, tuple[float, ...]]:
    if not isinstance(regimes, dict) or set(regimes) - set(REGIMES):
        raise SettingsError(f"{path}: regimes must be an object with the keys {' and '.join(REGIMES)}, or some of them")
    return {name: _temperatures(regime, num_positions, f"{path}: regimes.{name}") for name, regime in regimes.items()}


def _temperatures(regime: Any, num_positions: int, where: str) -> tuple[float, ...]:
    values = regime.get("temperatures") if isinstance(regime, dict) else None
    if not isinstance(values, list) or len(values) != num_positions:
        raise SettingsError(f"{where}.temperatures must be a list of {num_positions} numbers, one per draft position")
    if not all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in values):
        raise SettingsError(f"{where}.temperatures must be finite numbers above 0")
    return tuple(float(v) for v in values)


def save_calibration(folder: Path, calibration: Calibration, facts: Mapping[str, Any] | None = None) -> None:
    """Writes calibration.json whole or not at all. facts: what to remember of the fit (data, errors before and after)."""
    content = {
        **(facts or {}),
        "version": VERSION,
        "checkpoint": calibration.checkpoint,
        "regimes": {name: {"temperatures": list(values)} for name, values in calibration.temperatures.items()},
    }
    unfinished = folder / f".{FILE_NAME}.{os.getpid()}"
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, folder / FILE_NAME)
