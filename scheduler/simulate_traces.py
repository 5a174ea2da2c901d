"""Who accepts what in a simulation: acceptance traces instead of models.

Whether the drafted token at output position p of request r is right depends on (seed, r, p) and its place in the draft alone,
never on the planner, so planners are compared on the same text. Must not know costs, time or planners.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler.errors import SettingsError

Indices = npt.NDArray[np.int64]

_CERTAIN = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A request as it arrives: kind of text, prompt tokens, and the output tokens after which the target stops by itself."""

    kind: str
    num_prompt: int
    num_output: int


class Drafted(NamedTuple):
    """confidence: [n, w], None where the drafter states none. num_right: [n] leading drafts that are right, at most w."""

    confidence: npt.NDArray[np.float32] | None
    num_right: Indices


class Traces(Protocol):
    """width: the longest draft. max_output: the most tokens that any request may ask for. states: drafts carry confidences."""

    width: int
    max_output: int
    states: bool

    def open(self, index: int) -> Shape:
        """Request number `index` arrives."""
        ...

    def close(self, index: int) -> None: ...

    def draft(self, indices: Sequence[int], positions: Sequence[int], width: int) -> Drafted:
        """A draft of `width` tokens for each request, from each output position on."""
        ...


@dataclass(frozen=True, slots=True)
class TextClass:
    """How well the drafter knows a kind of text. rate: mean P(token accepted | the ones before it were) at the first position.

    The log-odds vary with the request (request_sd), along its text (drift_sd, remembered for drift_len tokens) and from token
    to token (token_sd); each place further into the draft costs depth_loss.
    """

    kind: str
    rate: float
    mean_prompt: float = 64.0
    mean_output: float = 160.0
    request_sd: float = 0.6
    drift_sd: float = 0.8
    drift_len: float = 24.0
    token_sd: float = 1.4
    depth_loss: float = 0.05

    @property
    def level(self) -> float:
        """Mean log-odds; the factor undoes what the spread takes from the mean of a logistic."""
        if self.rate in (0.0, 1.0):
            return math.copysign(_CERTAIN, self.rate - 0.5)
        variance = self.request_sd**2 + self.drift_sd**2 + self.token_sd**2
        return math.log(self.rate / (1 - self.rate)) * math.sqrt(1 + math.pi * variance / 8)


@dataclass(frozen=True, slots=True)
class Belief:
    """What the drafter says of its drafts. Calibrated by default: the confidence is the true chance.

    scale, bias: of the stated log-odds. constant: one confidence for all. nan_share: drafts whose confidences are NaN.
    telling: after a wrong token the next confidence is so many log-odds lower: it depends on the drafted token.
    """

    scale: float = 1.0
    bias: float = 0.0
    constant: float | None = None
    nan_share: float = 0.0
    telling: float = 0.0
    states: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """Kinds of text with their shares, and what the drafter believes."""

    mix: tuple[tuple[TextClass, float], ...]
    belief: Belief = field(default_factory=Belief)


# The paper's conditional acceptance (reference 1.12, Fig. 2, DSpark), and a drafter as weak as the demo's.
CODE, MATH, CHAT = TextClass("code", 0.886), TextClass("math", 0.905), TextClass("chat", 0.735)
_THIRDS = ((CODE, 1 / 3), (MATH, 1 / 3), (CHAT, 1 / 3))
_WEAK = tuple((replace(kind, rate=rate), 1 / 3) for kind, rate in ((CODE, 0.6), (MATH, 0.55), (CHAT, 0.33)))
WORKLOADS: dict[str, Workload] = {
    "mixed": Workload(_THIRDS),
    "code": Workload(((CODE, 1.0),)),
    "math": Workload(((MATH, 1.0),)),
    "chat": Workload(((CHAT, 1.0),)),
    "weak": Workload(_WEAK),
    "weak-chat": Workload((_WEAK[2],)),
    "average": Workload(((TextClass("", 0.75), 1.0),)),
    "hard-and-easy": Workload(((replace(MATH, rate=0.97), 0.5), (replace(CHAT, rate=0.08), 0.5))),
    "overconfident": Workload(_THIRDS, Belief(scale=1.5, bias=1.5)),
    "underconfident": Workload(_THIRDS, Belief(scale=0.6, bias=-1.0)),
    "silent": Workload(_THIRDS, Belief(states=False)),
    "telling": Workload(_THIRDS, Belief(telling=4.0)),
    "some-nan": Workload(_THIRDS, Belief(nan_share=0.3)),
    "all-nan": Workload(_THIRDS, Belief(nan_share=1.0)),
    "right": Workload(((TextClass("right", 1.0), 1.0),)),
    "right-but-shy": Workload(((TextClass("right", 1.0), 1.0),), Belief(constant=0.3)),
    "wrong": Workload(((TextClass("wrong", 0.0), 1.0),)),
    "wrong-but-bold": Workload(((TextClass("wrong", 0.0), 1.0),), Belief(constant=0.95)),
    "wrong-and-silent": Workload(((TextClass("wrong", 0.0), 1.0),), Belief(states=False)),
}


class SyntheticTraces:
    """Requests drawn from a workload. A row of the tables per open request."""

    def __init__(self, workload: Workload, *, seed: int = 0, width: int = 7, max_output: int = 512) -> None:
        self.width = width
        self.max_output = max_output
        self.states = workload.belief.states
        self._belief = workload.belief
        self._classes = [kind for kind, _ in workload.mix]
        self._shares = np.cumsum([share for _, share in workload.mix])
        self._seed = seed
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._odds = np.zeros((0, max_output + width), dtype=np.float32)
        self._chance = np.zeros_like(self._odds)
        self._depth_loss = np.zeros(0, dtype=np.float32)

    def open(self, index: int) -> Shape:
        rng = np.random.default_rng((self._seed, index))
        kind = self._classes[int(np.searchsorted(self._shares, rng.random() * self._shares[-1]))]
        row = self._take_row()
        self._rows[index] = row
        length = self._odds.shape[1]
        drift = _drift(rng.standard_normal(length), kind.drift_len)
        base = kind.level + kind.request_sd * rng.standard_normal()
        self._odds[row] = base + kind.drift_sd * drift + kind.token_sd * rng.standard_normal(length)
        self._chance[row] = rng.random(length)
        self._depth_loss[row] = kind.depth_loss
        return Shape(kind.kind, _length(rng, kind.mean_prompt, 2048), _length(rng, kind.mean_output, self.max_output))

    def close(self, index: int) -> None:
        self._free.append(self._rows.pop(index))

    def draft(self, indices: Sequence[int], positions: Sequence[int], width: int) -> Drafted:
        rows = np.array([self._rows[index] for index in indices])[:, None]
        depth = np.arange(width)
        where = np.asarray(positions)[:, None] + depth
        odds = self._odds[rows, where] - self._depth_loss[rows] * depth
        right = self._chance[rows, where] < _logistic(odds)
        num_right = np.where(right.all(axis=1), width, right.argmin(axis=1))
        return Drafted(self._stated(odds, right, self._chance[rows[:, 0], where[:, 0]]), num_right)

    def _stated(
        self, odds: npt.NDArray[np.float32], right: npt.NDArray[np.bool_], chance: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32] | None:
        belief = self._belief
        if not belief.states:
            return None
        if belief.constant is not None:
            return np.full(odds.shape, belief.constant, dtype=np.float32)
        odds = belief.scale * odds + belief.bias
        odds[:, 1:] -= belief.telling * ~right[:, :-1]
        confidence = _logistic(odds)
        if belief.nan_share:
            # Any function of the position's own chance would tell of the token; its low digits do not.
            confidence[(chance * 65536.0) % 1.0 < belief.nan_share] = np.nan
        return confidence

    def _take_row(self) -> int:
        if not self._free:
            have = len(self._odds)
            more = max(64, have)
            pad = ((0, more), (0, 0))
            self._odds, self._chance = np.pad(self._odds, pad), np.pad(self._chance, pad)
            self._depth_loss = np.pad(self._depth_loss, (0, more))
            self._free = list(range(have + more - 1, have - 1, -1))
        return self._free.pop()


class RecordedTraces:
    """Requests as they once ran, over and over. One JSON object a line:

    {"kind": "code", "prompt": 60, "rounds": [{"confidence": [0.9, 0.7], "verified": 2, "accepted": 1}, ...]}

    A draft from where a recorded round began gets that round's confidences and outcome; one from inside a round gets the rest of
    it. What was not verified then is drawn by its confidence, a function of (seed, request, position).
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], *, seed: int = 0, width: int = 7) -> None:
        """Raises SettingsError where a line is no trace."""
        self.width = width
        self._recordings = [_recording(number, line, width) for number, line in enumerate(lines, 1)]
        if not self._recordings:
            raise SettingsError("the trace file holds no requests")
        self.max_output = max(len(r.confidence) for r in self._recordings)
        self.states = True
        self._seed = seed
        self._open: dict[int, tuple[_Recording, Indices]] = {}

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, seed: int = 0, width: int = 7) -> RecordedTraces:
        try:
            text = Path(path).read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        except OSError as error:
            raise SettingsError(f"traces {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise SettingsError(f"traces {path}: not JSON lines: {error}") from None
        return cls(lines, seed=seed, width=width)

    def open(self, index: int) -> Shape:
        recording = self._recordings[index % len(self._recordings)]
        chance = np.random.default_rng((self._seed, index)).random(len(recording.confidence) + self.width)
        self._open[index] = recording, recording.num_right(chance)
        return Shape(recording.kind, recording.num_prompt, len(recording.confidence))

    def close(self, index: int) -> None:
        del self._open[index]

    def draft(self, indices: Sequence[int], positions: Sequence[int], width: int) -> Drafted:
        opened = [self._open[index] for index in indices]
        where = [min(p, len(num_right) - 1) for (_, num_right), p in zip(opened, positions, strict=True)]
        confidence = np.stack([r.confidence[p, :width] for (r, _), p in zip(opened, where, strict=True)])
        num_right = np.array([n[p] for (_, n), p in zip(opened, where, strict=True)])
        return Drafted(confidence, np.minimum(num_right, width))


@dataclass(frozen=True, slots=True)
class _Recording:
    """By output position: confidence [n, width] of a draft from there, how many of its tokens are known to be right, and whether
    the one after those is known to be wrong."""

    kind: str
    num_prompt: int
    confidence: npt.NDArray[np.float32]
    num_known: Indices
    ends: npt.NDArray[np.bool_]

    def num_right(self, chance: npt.NDArray[np.float64]) -> Indices:
        width = self.confidence.shape[1]
        drawn = chance[np.arange(len(self.confidence))[:, None] + np.arange(width)] < np.nan_to_num(self.confidence)
        right = drawn | (np.arange(width) < self.num_known[:, None])
        right[self.ends, self.num_known[self.ends]] = False
        return np.where(right.all(axis=1), width, right.argmin(axis=1))


def _recording(number: int, line: Mapping[str, Any], width: int) -> _Recording:
    rows: list[list[float]] = []
    known: list[int] = []
    ends: list[bool] = []
    try:
        for round_ in line["rounds"]:
            confidence = [float(c) for c in round_["confidence"]][:width]
            verified, accepted = int(round_["verified"]), int(round_["accepted"])
            if not 0 <= accepted <= verified <= len(round_["confidence"]):
                raise ValueError(f"{accepted} accepted of {verified} verified of {len(round_['confidence'])} drafted")
            for done in range(accepted + 1):
                rest = confidence[done:] or confidence[-1:] or [math.nan]
                rows.append(rest + [rest[-1]] * (width - len(rest)))
                known.append(min(accepted - done, width))
                ends.append(accepted < verified and accepted - done < width)
        if not rows:
            raise ValueError("it has no rounds")
        return _Recording(
            kind=str(line.get("kind", "")),
            num_prompt=max(1, int(line.get("prompt", 64))),
            confidence=np.array(rows, dtype=np.float32),
            num_known=np.array(known),
            ends=np.array(ends),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"line {number} of the traces is no request: {type(error).__name__} {error}") from None


def find_traces(name: str, *, seed: int, width: int) -> Traces:
    """A named workload or a file of recorded traces; raises SettingsError."""
    if name in WORKLOADS:
        return SyntheticTraces(WORKLOADS[name], seed=seed, width=width)
    if not Path(name).suffix:
        raise SettingsError(f"workload {name!r} is neither a .jsonl file nor one of {', '.join(WORKLOADS)}")
    return RecordedTraces.read(name, seed=seed, width=width)


def _drift(noise: npt.NDArray[np.float64], memory: float) -> npt.NDArray[np.float64]:
    """An autoregressive walk of unit variance that forgets within `memory` tokens."""
    powers = _powers(memory)
    drift = math.sqrt(1.0 - powers[0] ** 2) * noise
    drift[0] = noise[0]
    carry = 0.0
    # In pieces: over a long text the powers would underflow.
    for first in range(0, len(noise), len(powers)):
        part = drift[first : first + len(powers)]
        part[:] = powers[: len(part)] * (carry + np.cumsum(part / powers[: len(part)]))
        carry = part[-1]
    return drift


@functools.lru_cache(maxsize=64)
def _powers(memory: float) -> npt.NDArray[np.float64]:
    """[n] how much is left after 1, 2, ... tokens."""
    return np.exp(-np.arange(1, max(2, int(200 * memory))) / memory)


def _logistic(odds: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (1.0 / (1.0 + np.exp(-np.clip(odds, -_CERTAIN, _CERTAIN)))).astype(np.float32)


def _length(rng: np.random.Generator, mean: float, most: int) -> int:
    """Exponential around the mean, as lengths of answers roughly are, from 4 up."""
    return int(min(most, 4 + rng.exponential(max(0.0, mean - 4))))
