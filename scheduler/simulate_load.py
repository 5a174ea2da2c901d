"""When requests arrive in a simulation: clients that each wait for their answer, their number fixed or changing, or Poisson.

Request numbers are the arrivals' own: client c's j-th request, or the j-th arrival, is the same request under every planner. Must
not know what is done with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scheduler.errors import SettingsError

_DRAW = 1024


class Load(Protocol):
    """most: requests that can be live at once, 0 when nothing limits them."""

    most: int

    def due(self, now: float) -> list[int]:
        """Request numbers that arrive by now and were not given before."""
        ...

    def finished(self, index: int) -> None:
        """The request is over; its client may ask again."""
        ...

    def next_s(self, now: float) -> float:
        """When someone may arrive while nothing runs."""
        ...


class Clients:
    """A closed loop. levels: (from second, clients), linear in between and constant after the last."""

    def __init__(self, levels: Sequence[tuple[float, float]]) -> None:
        self._seconds = [second for second, _ in levels]
        self._levels = [level for _, level in levels]
        self.most = math.ceil(max(self._levels))
        self._num_asked = [0] * self.most
        self._waiting = [False] * self.most

    def level(self, now: float) -> int:
        return max(1, int(np.interp(now, self._seconds, self._levels) + 1e-9))

    def due(self, now: float) -> list[int]:
        arriving = []
        for client in range(self.level(now)):
            if not self._waiting[client]:
                self._waiting[client] = True
                arriving.append(client + self.most * self._num_asked[client])
                self._num_asked[client] += 1
        return arriving

    def finished(self, index: int) -> None:
        self._waiting[index % self.most] = False

    def next_s(self, now: float) -> float:
        return now


class Poisson:
    """An open loop: `rate` arrivals per second on average, whoever is still waiting."""

    def __init__(self, rate: float, *, seed: int = 0) -> None:
        self.most = 0
        self._rate = rate
        self._rng = np.random.default_rng((seed, 0xA1))
        self._times: list[float] = []
        self._num_given = 0

    def due(self, now: float) -> list[int]:
        first = self._num_given
        while self._time(self._num_given) <= now:
            self._num_given += 1
        return list(range(first, self._num_given))

    def finished(self, index: int) -> None:
        pass

    def next_s(self, now: float) -> float:
        return self._time(self._num_given)

    def _time(self, number: int) -> float:
        while number >= len(self._times):
            gaps = self._rng.exponential(1.0 / self._rate, _DRAW)
            start = self._times[-1] if self._times else 0.0
            self._times += (start + np.cumsum(gaps)).tolist()
        return self._times[number]


def parse_load(text: str, *, seconds: float, seed: int) -> Load:
    """`16`: so many clients. `16-64-16`: rising and falling, each leg as long as the other, over `seconds`. `poisson:20`: so many
    arrivals per second. Raises SettingsError."""
    try:
        if text.startswith("poisson:"):
            rate = float(text.removeprefix("poisson:"))
            if 0 < rate < math.inf:
                return Poisson(rate, seed=seed)
        else:
            levels = [int(part) for part in text.split("-")]
            if min(levels) >= 1:
                times = np.linspace(0.0, seconds, len(levels)).tolist()
                return Clients(list(zip(times, levels, strict=True)))
    except ValueError:
        pass
    raise SettingsError(f"load {text!r}: write clients (16), a ramp (1-64-1) or arrivals per second (poisson:20)")
