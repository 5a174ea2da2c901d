"""Is the text with drafts the text without? Compares answers id for id; a first difference may be a near-tie of the arithmetic.

Greedy answers are compared with a decode of the same engine with planner `off`, sampled ones likewise with a seed, which makes
the text a function of the target's logits (DESIGN 4.3). Batches of other shapes round differently, so where two texts part the
target itself, by transformers in float32, says how close the two tokens were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scheduler.wire import SamplingParams
from services.evaluation.rollouts import Answer
from verifier.sampling import seeded_pick
from verifier.sampling_table import SamplingTable

# In units of a logit. Those of small targets reach 20, where bfloat16 steps by 0.125 and dozens of layers have rounded before.
NEAR_TIE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}

_DRAWS = 64
_NOISE = tuple(2.0**exponent for exponent in range(-14, 2))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of one answer. gap: how far apart the two tokens are, in units of a logit (TieJudge); infinite where one text
    merely ended earlier."""

    prompt: int
    position: int
    gap: float


@dataclass(frozen=True, slots=True)
class Equality:
    num_compared: int
    differences: tuple[Difference, ...]
    near_tie: float

    @property
    def holds(self) -> bool:
        return all(difference.gap <= self.near_tie for difference in self.differences)

    def _largest_gap(self) -> float | str:
        largest = max((difference.gap for difference in self.differences), default=0.0)
        return round(largest, 4) if math.isfinite(largest) else "ended early"

    def facts(self) -> dict[str, Any]:
        return {
            "compared": self.num_compared,
            "equal": self.num_compared - len(self.differences),
            "near_ties": sum(difference.gap <= self.near_tie for difference in self.differences),
            "wrong": sum(difference.gap > self.near_tie for difference in self.differences),
            "largest_gap": self._largest_gap(),
        }


class TieJudge:
    """Loads the target a second time, at the first question."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None

    @torch.inference_mode()
    def gap(self, expected: Answer, served: Answer, position: int) -> float:
        """How far apart the two tokens at output position `position` are, all before it being equal, in units of a logit."""
        if self._model is None:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        ids = [*expected.prompt_ids, *expected.token_ids[:position]]
        logits = self._model(torch.tensor([ids])).logits[0, -1]
        pair = expected.token_ids[position], served.token_ids[position]
        if expected.params.greedy:
            return abs(float(logits[pair[0]] - logits[pair[1]]))
        return seeded_gap(logits, pair, expected.params, position)


def seeded_gap(logits: torch.Tensor, pair: tuple[int, int], params: SamplingParams, position: int) -> float:
    """The least noise on all logits [V] (standard deviation, in steps of 2) with which both tokens come out of the seeded draw;
    infinite beyond _NOISE. Asked of the draw itself, whose noise is shared among unlikely tokens: no formula of two logits."""
    generator = torch.Generator().manual_seed(0)
    table = SamplingTable.build([params] * _DRAWS, torch.device("cpu"))
    positions = torch.full((_DRAWS,), position)
    found: set[int] = set()
    for scale in _NOISE:
        noise = torch.randn(_DRAWS, len(logits), generator=generator)
        found |= set(seeded_pick(logits + scale * noise, table, positions).tolist())
        if found.issuperset(pair):
            return scale
    return float("inf")


def compare(expected: Sequence[Answer], served: Sequence[Answer], judge: TieJudge, near_tie: float) -> Equality:
    """Answers of the same turns of the same prompts. A conversation is compared up to its first difference: the turns behind it
    answer other messages."""
    differences: dict[int, Difference] = {}
    num_compared = 0
    for one, other in zip(expected, served, strict=True):
        if one.prompt in differences:
            continue
        num_compared += 1
        if one.token_ids != other.token_ids:
            differences[one.prompt] = _first_difference(one, other, judge)
    return Equality(num_compared, tuple(differences.values()), near_tie)


def _first_difference(expected: Answer, served: Answer, judge: TieJudge) -> Difference:
    pairs = zip(expected.token_ids, served.token_ids, strict=False)
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        shorter = min(len(expected.token_ids), len(served.token_ids))
        return Difference(expected.prompt, shorter, float("inf"))
    return Difference(expected.prompt, position, judge.gap(expected, served, position))
