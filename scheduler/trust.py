"""How far a forecast of drafting is to be trusted: what steps brought over what was promised for them, as a running mean.

Of many forecasts the gate follows those that promise most, and these are too good more often than not: what is chosen for its
estimate is chosen for the estimate's error too. The mean learns by how much. Must not know what was forecast, or why it came
otherwise.
"""

from __future__ import annotations

import math

# Rounds (a request's step) that the mean goes back at most: a step of few requests brings anything from half to twice what was
# promised; and at least, however long nothing was heard.
_MEMORY = 1024.0
_LEAST_MEMORY = 128.0
_LEAST, _MOST = 0.8, 1.25
# Steps without a promise after which the past counts a third: what was too good once must get another chance.
_FORGETS = 2048.0


class Trust:
    """`factor` times a promised rate is the rate to expect."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._rounds = _MEMORY

    def observe(self, *, promised: float, came: float, num_rounds: int) -> None:
        """Tokens per second of a step of so many requests; nothing is learned from what is not positive."""
        if 0.0 < promised < math.inf and 0.0 < came < math.inf:
            self._rounds = min(_MEMORY, self._rounds + num_rounds)
            moved = self.factor + min(1.0, num_rounds / self._rounds) * (came / promised - self.factor)
            self.factor = min(_MOST, max(_LEAST, moved))

    def rest(self) -> None:
        """A step without a promise has passed: what was found out counts less, against what will be and against no opinion."""
        self.factor += (1.0 - self.factor) / _FORGETS
        self._rounds += (_LEAST_MEMORY - self._rounds) / _FORGETS
