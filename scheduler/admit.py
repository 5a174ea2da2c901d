"""THE algorithm: how many drafted tokens of each request the target verifies this step. Pure, on plain arrays.

Must not know requests, blocks or clocks. Symbols (the paper's): R requests that drafted, W the longest draft, c[r, k] confidence
of draft k (0-based) given that its predecessors were accepted, a[r, k] = c[r, 0] ... c[r, k] its survival, l[r] the answer.

Every rule here is non-anticipating: whether draft k of request r is admitted is decided by c[r, :k + 1], which was known before
token k was sampled, and never by c[r, k + 1:], which depends on that token. Otherwise the output law would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from scheduler.errors import SettingsError

Seconds = npt.NDArray[np.float64]
Probabilities = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


class Rule(StrEnum):
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
        return self.rule if self.rule in (Rule.ALGORITHM1, Rule.OFF) else f"{self.rule}:{self.value:g}"


def parse_planner(text: str) -> Planner:
    """The planner that a setting names; raises SettingsError."""
    rule, colon, value = text.strip().partition(":")
    if not colon and rule in (Rule.ALGORITHM1, Rule.OFF):
        return Planner(Rule(rule))
    if rule == Rule.FIXED and value.isascii() and value.isdigit() and int(value) >= 1:
        return Planner(Rule.FIXED, int(value))
    if rule == Rule.THRESHOLD and (threshold := _fraction(value)) is not None:
        return Planner(Rule.THRESHOLD, threshold)
    raise SettingsError(
        f"scheduler.planner {text!r} is not a planner; use algorithm1, fixed:k (k >= 1), threshold:x (x from 0 to 1) or off"
    )


def admit(
    planner: Planner,
    *,
    confidence: Probabilities,
    caps: Lengths,
    num_sampling: int,
    step_seconds: Seconds | None,
) -> Lengths:
    """[R] draft tokens to verify, at most caps.

    confidence: [R, W]; NaN counts as 0. caps: [R] drafted tokens that may be verified at all. num_sampling: requests that get a
    token this step, drafted or not. step_seconds: [caps.sum() + 1] seconds of the whole step with 0, 1, 2 ... draft tokens in
    it; None when no curve is known, and then nothing is trimmed.
    """
    if planner.rule is Rule.OFF:
        return np.zeros(len(caps), dtype=np.int64)
    if planner.rule is Rule.FIXED:
        return np.minimum(caps, int(planner.value))
    if planner.rule is Rule.THRESHOLD:
        return threshold(confidence=confidence, caps=caps, least=planner.value)
    if step_seconds is None:
        return caps.copy()
    return algorithm1(
        survival=survivals(confidence=confidence, caps=caps), num_sampling=num_sampling, step_seconds=step_seconds
    )


def survivals(*, confidence: Probabilities, caps: Lengths) -> Probabilities:
    """[R, W] a[r, k]; 0 from caps[r] on and from the first NaN on."""
    usable = np.arange(confidence.shape[1]) < caps[:, None]
    clean = np.where(usable & ~np.isnan(confidence), confidence, 0.0)
    return np.cumprod(np.clip(clean, 0.0, 1.0), axis=1)


def algorithm1(*, survival: Probabilities, num_sampling: int, step_seconds: Seconds) -> Lengths:
    """[R] lengths of Algorithm 1: admit by descending survival while expected tokens per second strictly grow.

    The break at the first candidate that does not help is what makes the search non-anticipating. Equal survivals go by
    position, so that a prefix is never skipped; zero survivals are no candidates. Needs step_seconds for every candidate.
    """
    num_requests = len(survival)
    by_position = survival.T.ravel()
    order = np.argsort(-by_position, kind="stable")
    order = order[: np.count_nonzero(by_position > 0.0)]
    tokens = np.cumsum(np.concatenate(([num_sampling], by_position[order])))
    throughput = tokens / step_seconds[: len(tokens)]
    no_better = throughput[1:] <= throughput[:-1]
    num_admitted = int(no_better.argmax()) if no_better.any() else len(order)
    return np.bincount(order[:num_admitted] % num_requests, minlength=num_requests)


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
