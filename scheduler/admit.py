"""THE algorithm: how many drafted tokens of each request the target verifies this step. Pure, on plain arrays.

Must not know requests, blocks or clocks. Symbols (the paper's): R requests that drafted, W the longest draft, c[r, k] confidence
of draft k (0-based) given that its predecessors were accepted, a[r, k] = c[r, 0] ... c[r, k] its survival, l[r] the answer.

Every rule here is non-anticipating: whether draft k of request r is admitted is decided by c[r, :k + 1], which was known before
token k was sampled, and never by c[r, k + 1:], which depends on that token. Otherwise the output law would be wrong. Whatever
looks at the whole curve (`auto`) therefore takes its view of the survivals further down from earlier steps (reference 1.10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.errors import SettingsError

Seconds = npt.NDArray[np.float64]
Probabilities = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]

# Survivals below this are expected as if they were this, so that a rank nobody expected can still show its worth.
_LEAST_OUTLOOK = 0.01
# At the optimum a candidate exactly as good as expected is exactly worth its price; rounding must not decide.
_NEARLY = 1.0 - 1e-6
_ALL_STOPS = 32


class Rule(StrEnum):
    AUTO = "auto"
    ALGORITHM1 = "algorithm1"
    FIXED = "fixed"
    THRESHOLD = "threshold"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Planner:
    """value: the k of `fixed:k`, the x of `threshold:x`."""

    rule: Rule
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.rule}:{self.value:g}" if self.rule in (Rule.FIXED, Rule.THRESHOLD) else self.rule

    @property
    def adaptive(self) -> bool:
        """It weighs drafts against the cost curve."""
        return self.rule in (Rule.AUTO, Rule.ALGORITHM1)


def parse_planner(text: str) -> Planner:
    """The planner that a setting names; raises SettingsError."""
    rule, colon, value = text.strip().partition(":")
    if not colon and rule in (Rule.AUTO, Rule.ALGORITHM1, Rule.OFF):
        return Planner(Rule(rule))
    if rule == Rule.FIXED and value.isascii() and value.isdigit() and len(value) < 10 and int(value) >= 1:
        return Planner(Rule.FIXED, int(value))
    if rule == Rule.THRESHOLD and (threshold := _fraction(value)) is not None:
        return Planner(Rule.THRESHOLD, threshold)
    raise SettingsError(
        f"scheduler.planner {text!r} is not a planner; use auto, algorithm1, fixed:k (k from 1 to 999999999), "
        "threshold:x (x from 0 to 1) or off"
    )


def admit(
    planner: Planner,
    *,
    confidence: Probabilities,
    caps: Lengths,
    num_sampling: float,
    step_seconds: Seconds | None,
    outlook: Probabilities | None = None,
) -> Lengths:
    """[R] draft tokens to verify, at most caps.

    confidence: [R, W]; NaN counts as 0. caps: [R] drafted tokens that may be verified at all. num_sampling: tokens that this
    step emits without these drafts. step_seconds: [caps.sum() + 1] seconds of the whole step with 0, 1, 2 ... draft tokens in
    it; None when no curve is known, and then nothing is trimmed. outlook: [R * W], for `auto`: see there.
    """
    if planner.rule is Rule.OFF:
        return np.zeros(len(caps), dtype=np.int64)
    if planner.rule is Rule.FIXED:
        return np.minimum(caps, int(planner.value))
    if planner.rule is Rule.THRESHOLD:
        return threshold(confidence=confidence, caps=caps, least=planner.value)
    if step_seconds is None:
        return caps.copy()
    known = outlook[: len(step_seconds) - 1] if planner.rule is Rule.AUTO and outlook is not None else None
    if kernels.load() is not None and len(step_seconds) > 1:
        return _natively(confidence, caps, known, num_sampling, step_seconds)
    survival = survivals(confidence=confidence, caps=caps)
    if known is not None:
        return auto(survival=survival, outlook=known, num_sampling=num_sampling, step_seconds=step_seconds)
    return algorithm1(survival=survival, num_sampling=num_sampling, step_seconds=step_seconds)


def survivals(*, confidence: Probabilities, caps: Lengths) -> Probabilities:
    """[R, W] a[r, k]; 0 from caps[r] on and from the first NaN on."""
    clean = np.fmin(np.fmax(confidence, 0.0), 1.0)  # of a number and NaN these are the number
    if int(caps.min(initial=confidence.shape[1])) < confidence.shape[1]:
        clean *= np.arange(confidence.shape[1]) < caps[:, None]
    survival: Probabilities = np.cumprod(clean, axis=1, dtype=np.float64)
    return survival


def algorithm1(*, survival: Probabilities, num_sampling: float, step_seconds: Seconds) -> Lengths:
    """[R] lengths of Algorithm 1: admit by descending survival while expected tokens per second strictly grow.

    The break at the first candidate that does not help is what makes the search non-anticipating. Equal survivals go by
    position, so that a prefix is never skipped; zero survivals are no candidates. Needs step_seconds for every candidate.
    """
    candidates, ranked = _ranked(survival)
    tokens = np.cumsum(np.concatenate(([num_sampling], ranked)), dtype=np.float64)
    throughput = tokens / step_seconds[: len(tokens)]
    no_better = throughput[1:] <= throughput[:-1]
    return _first(candidates, ranked, int(no_better.argmax()) if no_better.any() else len(ranked))


def auto(*, survival: Probabilities, outlook: Probabilities, num_sampling: float, step_seconds: Seconds) -> Lengths:
    """[R] lengths of the global optimum over the curve, staircase or not, priced by the past and ranked by the present.

    outlook: [R * W] survivals expected by rank, descending, from information at least two steps old. It gives each rank the
    least survival with which going on still pays somewhere further down the curve; fresh survivals are admitted in order
    until the first that falls short. Where they equal the outlook that is the global argmax, reference 1.10's capacity; where
    they do not, each request's present decides what the past could not know.
    """
    candidates, ranked = _ranked(survival)
    if not len(ranked):
        return np.zeros(len(survival), dtype=np.int64)
    # As long as it was before anything was drawn: cut to the survivals that turned out positive, it would tell of them.
    known = outlook[: len(step_seconds) - 1]
    price = least_survivals(outlook=known, num_sampling=num_sampling, step_seconds=step_seconds)
    falls_short = ranked < price[: len(ranked)]
    return _first(candidates, ranked, int(falls_short.argmax()) if falls_short.any() else len(ranked))


def _natively(
    confidence: Probabilities, caps: Lengths, outlook: Probabilities | None, num_sampling: float, step_seconds: Seconds
) -> Lengths:
    """`survivals`, then `auto` or, without an outlook, `algorithm1`, by planning.c. step_seconds: [> 1]."""
    native = kernels.load()
    assert native is not None
    lengths = np.empty(len(caps), dtype=np.int64)
    drafts = kernels.doubles(confidence), kernels.integers(caps), *confidence.shape
    if outlook is None:
        native.dspark_algorithm1(*drafts, kernels.doubles(step_seconds), num_sampling, kernels.integers(lengths))
        return lengths
    stops, _ = _stops(len(outlook))
    native.dspark_auto(
        *drafts,
        kernels.doubles(outlook),
        len(outlook),
        kernels.doubles(step_seconds),
        num_sampling,
        kernels.integers(stops),
        len(stops),
        _LEAST_OUTLOOK,
        _NEARLY,
        kernels.integers(lengths),
    )
    return lengths


def least_survivals(*, outlook: Probabilities, num_sampling: float, step_seconds: Seconds) -> Probabilities:
    """[n] what the candidate of each rank must be worth, from the outlook [n] and the curve [> n] alone.

    With P(i) the outlook's sum over the first i ranks and T(i) the seconds with i drafts, the best throughput to be had is
    X = max (num_sampling + P(i)) / T(i). Candidate i pays if the ranks from i to some j, all scaled as i turned out against the
    outlook, are worth their time at X: survival_i / outlook_i >= X * min over j of (T(j) - T(i - 1)) / (P(j) - P(i - 1)).
    """
    expected = np.maximum(outlook, _LEAST_OUTLOOK)
    tokens = np.concatenate(([0.0], np.cumsum(expected)))
    seconds = step_seconds[: len(tokens)]
    best = ((num_sampling + tokens) / seconds).max()
    stops, behind = _stops(len(outlook))
    every = len(stops) == len(tokens)
    at_tokens, at_seconds = (tokens, seconds) if every else (tokens[stops], seconds[stops])
    gain = np.maximum(at_tokens - at_tokens[:, None], _LEAST_OUTLOOK)
    price = at_seconds - at_seconds[:, None] + behind
    ratio = (price / gain).min(axis=1)[:-1] * (best * _NEARLY)
    return (ratio if every else np.repeat(ratio, np.diff(stops))) * expected


@lru_cache(maxsize=64)
def _stops(n: int) -> tuple[Lengths, Seconds]:
    """[S] numbers of drafts, 0 to n, between which prices are compared: all small ones, then about 10 % apart. [S, S] what rules
    out going back from one to another: infinite on and below the diagonal."""
    stops = np.arange(n + 1)
    if n > _ALL_STOPS:
        num_far = int(math.log(n / _ALL_STOPS) / math.log(1.1)) + 2
        far = np.geomspace(_ALL_STOPS, n, num_far).astype(np.int64)
        stops = np.unique(np.concatenate((np.arange(_ALL_STOPS), far, [n])))
    return stops, np.where(stops > stops[:, None], 0.0, np.inf)


def _ranked(survival: Probabilities) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[W, R] the candidates' survivals, and those above zero by rank. In float32: half as long to sort, and the same for every
    one of equal survivals, whose order is by position, then row."""
    candidates = np.ascontiguousarray(survival.T, dtype=np.float32)
    ranked = np.sort(candidates, axis=None)[::-1]
    return candidates, ranked[: int(np.count_nonzero(ranked > 0.0))]


def _first(candidates: npt.NDArray[np.float32], ranked: npt.NDArray[np.float32], count: int) -> Lengths:
    """[R] how many of each row are among the first `count` by rank. What comes later in a row cannot change what comes before."""
    if count == 0:
        return np.zeros(candidates.shape[1], dtype=np.int64)
    if count == len(ranked):
        return (candidates > 0.0).sum(axis=0)
    last = ranked[count - 1]
    better = candidates > last
    lengths: Lengths = better.sum(axis=0)
    equals = np.flatnonzero(candidates.ravel() == last)[: count - int(lengths.sum())]
    return lengths + np.bincount(equals % candidates.shape[1], minlength=candidates.shape[1])


def threshold(*, confidence: Probabilities, caps: Lengths, least: float) -> Lengths:
    """[R] the prefix before the first confidence below `least`, which is how DeepSpec cuts; NaN counts as 0."""
    fails = ~(np.nan_to_num(confidence, nan=0.0) >= least)
    first = np.where(fails.any(axis=1), fails.argmax(axis=1), confidence.shape[1])
    return np.minimum(first, caps)


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None
