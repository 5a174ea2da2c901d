"""What turns confidence logits into calibrated probabilities, and its file beside the weights.

calibration.json:

    {"version": 1,
     "checkpoint": "<fingerprint of the weights it was fitted for>",
     "regimes": {"greedy":  {"temperatures": [T_1, ..., T_γ], "biases": [b_1, ..., b_γ]},
                 "sampled": {...}, "seeded": {...}}}

Position k of a request has confidence sigmoid(z_k / T_k + b_k), z the logit of the confidence head. The paper has temperatures
alone; `biases` is our extension (drafter/temperature_scaling.py says why) and may be left out, which is all 0. Either way the
result is a function of z_k alone, so that the admission of a token still does not depend on that token.

How often a drafter is right depends on how tokens are drawn, so each regime has its own numbers: `greedy` is fitted at
temperature 0, `sampled` at temperature 1 with rejection sampling, `seeded` at temperature 1 with a seed (drafter and target
then share their noise, which agrees less often than rejection sampling accepts). Between temperatures 0 and 1 the calibrated
logits of `greedy` and of the request's other regime are mixed in proportion; above 1 the latter holds. A regime that is absent
is replaced: `seeded` by `sampled`, others by the head's own logits. Unknown keys are facts of the fit and are ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.errors import SettingsError
from scheduler.wire import FloatArray, SamplingParams

FILE_NAME = "calibration.json"
VERSION = 1
GREEDY, SAMPLED, SEEDED = "greedy", "sampled", "seeded"
REGIMES = (GREEDY, SAMPLED, SEEDED)


@dataclass(frozen=True, slots=True)
class Scaling:
    """[γ] each; temperatures finite and above 0, biases finite."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]

    @classmethod
    def of_temperatures(cls, *temperatures: float) -> Scaling:
        return cls(temperatures, (0.0,) * len(temperatures))

    def logits(self, raw: FloatArray) -> FloatArray:
        """[..., w] -> [..., w], for the first w positions."""
        width = raw.shape[-1]
        temperatures, biases = (np.array(x[:width], dtype=np.float32) for x in (self.temperatures, self.biases))
        return raw / temperatures + biases


@dataclass(frozen=True, slots=True)
class Calibration:
    """checkpoint: fingerprint of the weights, empty if unknown."""

    regimes: Mapping[str, Scaling] = field(default_factory=dict)
    checkpoint: str = ""

    def apply(self, logits: FloatArray, params: Sequence[SamplingParams]) -> FloatArray:
        """logits [R, w] -> confidence [R, w] in (0, 1), each row as its request draws its tokens."""
        if not self.regimes:
            return sigmoid(logits)
        sampled = np.array([min(1.0, 0.0 if p.greedy else p.temperature) for p in params], dtype=np.float32)[:, None]
        seeded = np.array([p.seed is not None for p in params], dtype=bool)[:, None]
        drawn = np.where(seeded, self._scaled(SEEDED, logits), self._scaled(SAMPLED, logits))
        return sigmoid(sampled * drawn + (1.0 - sampled) * self._scaled(GREEDY, logits))

    def _scaled(self, regime: str, logits: FloatArray) -> FloatArray:
        scaling = self.regimes.get(regime)
        if scaling is not None:
            return scaling.logits(logits)
        return self._scaled(SAMPLED, logits) if regime == SEEDED else logits


UNCALIBRATED = Calibration()


def sigmoid(x: FloatArray) -> FloatArray:
    """Without overflow on either side; float32, from float64, in which small probabilities keep their digits."""
    return (0.5 * (1.0 + np.tanh(0.5 * x.astype(np.float64)))).astype(np.float32)


def logits_of(confidence: FloatArray) -> FloatArray:
    """The logits of uncalibrated confidences; certainties become the largest logits that float32 confidences can have."""
    clipped = np.clip(confidence.astype(np.float64), 1e-12, 1.0 - 2.0**-25)
    return (np.log(clipped) - np.log1p(-clipped)).astype(np.float32)


def load_calibration(folder: Path, num_positions: int, fingerprint: str) -> Calibration:
    """The folder's calibration, or none where it has no file. Raises SettingsError naming file and field."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return UNCALIBRATED
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not valid JSON: {error}; calibrate again or remove the file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}; calibrate again or remove the file") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise SettingsError(f"{path}: version must be {VERSION}; calibrate again or remove the file")
    checkpoint = str(content.get("checkpoint") or "")
    if checkpoint and checkpoint != fingerprint:
        raise SettingsError(f"{path}: checkpoint {checkpoint} is not these weights ({fingerprint}); calibrate again")
    return Calibration(_regimes(content.get("regimes"), num_positions, path), checkpoint)


def _regimes(regimes: Any, num_positions: int, path: Path) -> dict[str, Scaling]:
    if not isinstance(regimes, dict) or set(regimes) - set(REGIMES):
        names = ", ".join(REGIMES)
        raise SettingsError(f"{path}: regimes must be an object with the keys {names}, or some of them")
    return {name: _scaling(regime, num_positions, f"{path}: regimes.{name}") for name, regime in regimes.items()}


def _scaling(regime: Any, num_positions: int, where: str) -> Scaling:
    content = regime if isinstance(regime, dict) else {}
    temperatures = _numbers(content.get("temperatures"), num_positions, f"{where}.temperatures")
    if min(temperatures) <= 0:
        raise SettingsError(f"{where}.temperatures must be above 0")
    if "biases" not in content:
        return Scaling.of_temperatures(*temperatures)
    return Scaling(temperatures, _numbers(content["biases"], num_positions, f"{where}.biases"))


def _numbers(values: Any, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise SettingsError(f"{where} must be a list of {count} numbers, one per draft position")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        raise SettingsError(f"{where} must be finite numbers")
    return tuple(float(v) for v in values)


def save_calibration(folder: Path, calibration: Calibration, facts: Mapping[str, Any] | None = None) -> None:
    """Writes calibration.json whole or not at all. facts: what to remember of the fit (data, errors before and after)."""
    content = {
        **(facts or {}),
        "version": VERSION,
        "checkpoint": calibration.checkpoint,
        "regimes": {
            name: {"temperatures": list(scaling.temperatures), "biases": list(scaling.biases)}
            for name, scaling in calibration.regimes.items()
        },
    }
    unfinished = folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(unfinished, folder / FILE_NAME)
    except OSError as error:
        raise SettingsError(f"could not write {folder / FILE_NAME}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
