"""Sequential temperature scaling (the paper's 3.2.1): fits what drafter/calibration.py applies, on finished rounds.

Positions are fitted left to right. Position k gets the temperature whose cumulative product, the calibrated positions before it
held fixed, has the smallest ECE against "drafts 0..k were all accepted". Ties go to the temperature nearest 1.

A temperature alone cannot move a confidence across one half, so a head that says 0.6 where 0.45 are accepted stays wrong (the
demo drafter's does: 4.1 % mean ECE before and 4.3 % after; with biases 0.9 %). Hence our extension, sigmoid(z / T + b): each
temperature comes with the bias of highest likelihood, which makes the position right on average over the rounds that reached
it. A bias is a constant of its position, so what it yields still depends on the position's own logit alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafter.calibration import Scaling, sigmoid
from drafter.reliability import Outcomes, expected_calibration_error
from drafter.rounds import Floats, Rounds
from scheduler.wire import FloatArray

# log-spaced, 1.0 exactly in the middle
TEMPERATURES = tuple(float(t) for t in 2.0 ** np.linspace(-2.0, 2.0, 49))
# Where a position was always accepted, or never, likelihood knows no end.
LARGEST_BIAS = 4.0
_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class Search:
    """with_bias False is the paper's method. least_rounds: a position that fewer rounds reached is not fitted but inherits."""

    temperatures: tuple[float, ...] = TEMPERATURES
    with_bias: bool = True
    least_rounds: int = 50


def num_reached(rounds: Rounds) -> list[int]:
    """[γ]: how many rounds tell about a position, which are those that proposed it and accepted all drafts before it."""
    return [int(((rounds.proposed > k) & (rounds.accepted >= k)).sum()) for k in range(rounds.width)]


def fit_scaling(rounds: Rounds, search: Search | None = None, known: Scaling | None = None) -> Scaling:
    """A position that too few rounds reached inherits: from `known`, an earlier fit of the same head and regime, otherwise
    from the position before it, and the first from nobody (temperature 1, bias 0). Raises ValueError for rounds without logits.
    """
    search = search or Search()
    reached = num_reached(rounds)
    survival = np.ones(len(rounds))
    pairs: list[tuple[float, float]] = []
    for k in range(rounds.width):
        rows = rounds.proposed > k
        logits = rounds.logits[rows, k].astype(np.float32)
        if np.isnan(logits).any():
            raise ValueError("rounds without confidence logits cannot be calibrated")
        accepted = rounds.accepted[rows]
        if reached[k] >= search.least_rounds:
            pairs.append(_best(survival[rows], logits, accepted >= k, accepted > k, search))
        elif known:
            pairs.append((known.temperatures[k], known.biases[k]))
        else:
            pairs.append(pairs[-1] if pairs else (1.0, 0.0))
        temperature, bias = pairs[-1]
        survival[rows] *= sigmoid(logits / temperature + bias)
    return Scaling(tuple(t for t, _ in pairs), tuple(b for _, b in pairs))


def _best(
    before: Floats, logits: FloatArray, reached: Outcomes, survived: Outcomes, search: Search
) -> tuple[float, float]:
    """Temperature and bias with the smallest ECE. All [N]; before: calibrated survival up to the position."""
    ranked = []
    for temperature in search.temperatures:
        bias = likeliest_bias(logits[reached] / temperature, survived[reached]) if search.with_bias else 0.0
        error = expected_calibration_error(before * sigmoid(logits / temperature + bias), survived)
        ranked.append((round(error, 12), abs(np.log(temperature)), temperature, bias))
    return min(ranked)[2:]


def likeliest_bias(logits: FloatArray, happened: Outcomes) -> float:
    """The b with sum(sigmoid(logits + b)) = number of successes, by bisection; at most LARGEST_BIAS away from 0."""
    low, high = -LARGEST_BIAS, LARGEST_BIAS
    num_hits = happened.sum()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sigmoid(logits + np.float32(middle)).sum(dtype=np.float64) < num_hits:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 4)
