"""What an evaluation is asked and what it finds, before anything is averaged, rounded or written."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter.reliability import Fit
from drafter.rounds import Rounds
from services.evaluation.equality import Equality


@dataclass(frozen=True, slots=True)
class EvaluateSpec:
    """data: JSONL files. drafters: checkpoint folders, the first is what others are compared with. max_prompts: per data set,
    0 is all. check_prompts: of each data set and temperature, compared with plain decoding; 0 is none. sweep_prompts: run once
    per threshold; 0 is none. thresholds: of the calibrated confidence. num_turns: user turns asked of a prompt, 0 is all."""

    data: tuple[str, ...]
    drafters: tuple[str, ...]
    out: str
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_prompts: int = 0
    max_tokens: int = 256
    num_turns: int = 1
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    sweep_prompts: int = 4
    check_prompts: int = 8
    concurrency: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One threshold: tokens emitted and drafts verified per round, over all data sets."""

    threshold: float
    accepted_length: float
    verified: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One drafter on one data set at one temperature. before, after: None without a confidence head; after: None without a
    calibration. raw, calibrated: [N, γ] confidences. equality: None when not checked."""

    drafter: str
    dataset: str
    temperature: float
    num_prompts: int
    num_too_long: int
    rounds: Rounds
    raw: np.ndarray
    calibrated: np.ndarray
    before: Fit | None
    after: Fit | None
    equality: Equality | None


@dataclass(slots=True)
class Evaluation:
    """sweeps: by drafter and temperature, thresholds ascending, 0 first."""

    model: str
    cells: list[Cell] = field(default_factory=list)
    sweeps: dict[tuple[str, float], list[SweepPoint]] = field(default_factory=dict)
