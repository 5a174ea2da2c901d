"""What drafting would bring, before anyone drafts: expected tokens per second over (requests that draft, width).

The planner's objective with expected survivals in place of real ones, cut as the planner would cut them. Pure, on plain arrays.
Must not know requests or blocks, nor when to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.admit import Lengths, Probabilities, Seconds

# More requests than this are weighed in as many groups of neighbours in the ranking.
_MOST_GROUPS = 32


@dataclass(frozen=True, slots=True)
class Prices:
    """num_sampling: requests that get a token this step. verify_seconds: [R * width + 1] seconds of the step with that many
    draft tokens. draft_seconds: [> R, > width] seconds of a draft, by table; row 0 is what is drafted anyway.
    looks_ahead: the planner finds the optimum past a dip of the throughput; Algorithm 1 stops before it."""

    num_sampling: float
    verify_seconds: Seconds
    draft_seconds: Seconds
    looks_ahead: bool = False


@dataclass(frozen=True, slots=True)
class BestDraft:
    """ranking: [R] candidates, the most promising first; the first `count` of them draft `width` tokens. rate, plain_rate:
    tokens per second with that, and when nobody drafts."""

    ranking: Lengths
    count: int
    width: int
    rate: float
    plain_rate: float


def best_draft(survival: Probabilities, spread: Probabilities | None, prices: Prices, widths: Lengths) -> BestDraft:
    """See Forecast. survival: [R, W]; widths: what may be drafted."""
    native = kernels.load()
    if native is None:
        forecast = Forecast(survival, spread, prices)
        return BestDraft(forecast.ranking, *forecast.best(widths), forecast.plain_rate)
    edges, _, coarse = _groups(len(survival))
    verify, draft = np.ascontiguousarray(prices.verify_seconds), np.ascontiguousarray(prices.draft_seconds)
    ranking, best, rates = np.empty(len(survival), dtype=np.int64), np.empty(2, dtype=np.int64), np.empty(2)
    native.dspark_forecast(
        kernels.doubles(survival),
        *survival.shape,
        None if spread is None or not spread.any() else kernels.doubles(spread),
        kernels.doubles(verify),
        len(verify),
        kernels.doubles(draft),
        draft.shape[1],
        prices.num_sampling,
        prices.looks_ahead,
        kernels.integers(edges),
        len(edges) - 1,
        kernels.integers(coarse),
        len(coarse),
        kernels.integers(widths),
        len(widths),
        kernels.integers(ranking),
        kernels.integers(best),
        kernels.doubles(rates),
    )
    return BestDraft(ranking, int(best[0]), int(best[1]), float(rates[0]), float(rates[1]))


class Forecast:
    def __init__(self, survival: Probabilities, spread: Probabilities | None, prices: Prices) -> None:
        """survival: [R, W] expected of each candidate's draft, 0 where it cannot go. spread: [W] see scheduler/estimates.py."""
        self._prices = prices
        self.ranking = np.argsort(-survival.sum(axis=1), kind="stable")
        num_requests = len(survival)
        self._edges, sizes, self._coarse = _groups(num_requests)
        means = survival[self.ranking]
        if len(sizes) < num_requests:
            means = np.add.reduceat(means, self._edges[:-1], axis=0) / sizes[:, None]
        self._candidates(means, sizes, spread)

    @property
    def plain_rate(self) -> float:
        return float(self._prices.num_sampling / (self._prices.verify_seconds[0] + self._prices.draft_seconds[0, 0]))

    def best(self, widths: Lengths) -> tuple[int, int, float]:
        """(requests, the first in the ranking; width; tokens per second) of the best there is to draft."""
        coarse, num_groups = self._coarse, len(self._edges) - 1
        rates = self._rates(coarse.repeat(len(widths)), np.concatenate([widths] * len(coarse)))
        place = int(rates.argmax())
        count, width, rate = int(coarse[place // len(widths)]), int(widths[place % len(widths)]), float(rates[place])
        untried = [n for n in range(count // 2 + 1, min(2 * count, num_groups)) if n != count]
        if untried:
            between = np.array(untried[:: -(-len(untried) // 8)])
            finer = self._rates(between, np.full(len(between), width))
            if finer.max() > rate:
                count, rate = int(between[finer.argmax()]), float(finer.max())
        return int(self._edges[count]), width, rate

    def _candidates(self, means: Probabilities, sizes: Lengths, spread: Probabilities | None) -> None:
        """Each mean stands for two drafts as likely, one better and one worse by the spread."""
        num_groups = len(means)
        if spread is not None and spread.any():
            apart = np.minimum(np.sqrt(spread * means * (1.0 - means)), np.minimum(means, 1.0 - means))
            halves = np.concatenate((np.minimum.accumulate(means + apart, axis=1), means - apart))
            weights = np.tile(sizes, 2) / 2.0
        else:
            halves, weights = means, sizes.astype(np.float64)
        by_position = halves.T.ravel()
        order = np.argsort(-by_position, kind="stable")
        order = order[: max(1, int(np.count_nonzero(by_position > 0.0)))]
        self._survival = by_position[order]
        self._group = order % len(halves) % num_groups
        self._depth = order // len(halves)
        self._weight = weights[order % len(halves)]

    def _rates(self, counts: Lengths, widths: Lengths) -> npt.NDArray[np.float64]:
        """[C] expected tokens per second when the first counts[c] groups draft widths[c] tokens, cut as the planner cuts."""
        prices = self._prices
        weight = self._weight * ((self._group < counts[:, None]) & (self._depth < widths[:, None]))
        tokens = prices.num_sampling + np.cumsum(weight * self._survival, axis=1)
        seconds = _between(prices.verify_seconds, np.cumsum(weight, axis=1))
        draft_s = prices.draft_seconds[self._edges[counts], widths][:, None]
        undrafted = prices.num_sampling / (prices.verify_seconds[0] + draft_s)
        path = np.concatenate((undrafted, tokens / (seconds + draft_s)), axis=1)
        if prices.looks_ahead:
            best: npt.NDArray[np.float64] = path.max(axis=1)
            return best
        stops = (weight > 0.0) & (path[:, 1:] <= path[:, :-1])
        first_stop = np.where(stops.any(axis=1), stops.argmax(axis=1), stops.shape[1])
        stopped: npt.NDArray[np.float64] = path[np.arange(len(counts)), first_stop]
        return stopped


@lru_cache(maxsize=256)
def _groups(num_requests: int) -> tuple[Lengths, Lengths, Lengths]:
    """Where the groups of so many ranked requests begin and end, their sizes, and the numbers of groups that are tried first."""
    edges = np.linspace(0, num_requests, min(num_requests, _MOST_GROUPS) + 1).astype(np.int64)
    num_groups = len(edges) - 1
    return edges, np.diff(edges), np.array([1 << i for i in range((num_groups - 1).bit_length())] + [num_groups])


def _between(table: Seconds, places: npt.NDArray[np.float64]) -> Seconds:
    """The table at places between its entries."""
    low = places.astype(np.int64)
    part = places - low
    seconds: Seconds = table[low] + part * (table[np.minimum(low + 1, len(table) - 1)] - table[low])
    return seconds
