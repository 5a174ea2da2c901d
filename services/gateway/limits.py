"""How much one API key may ask of this replica: requests a minute and requests at a time.

Exact: everything happens between two awaits of one event loop, the minute slides, and a request is live until its last byte
is sent or its client is gone. Each gateway replica counts by itself, so a deployment of N admits up to N times as much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """requests_per_minute: begun within any 60 seconds. max_live: at a time. 0 is no limit."""

    requests_per_minute: int = 0
    max_live: int = 0


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Standing:
    """What a key has left, as told to its client. reset_s: until the whole minute's worth is there again."""

    limits: Limits
    left_requests: int = 0
    left_live: int = 0
    reset_s: float = 0.0

    def headers(self) -> dict[str, str]:
        """OpenAI's names for the rate; `-live` are ours."""
        found = {}
        if self.limits.requests_per_minute:
            found["x-ratelimit-limit-requests"] = str(self.limits.requests_per_minute)
            found["x-ratelimit-remaining-requests"] = str(self.left_requests)
            found["x-ratelimit-reset-requests"] = f"{math.ceil(self.reset_s * 1000)}ms"
        if self.limits.max_live:
            found["x-ratelimit-limit-live"] = str(self.limits.max_live)
            found["x-ratelimit-remaining-live"] = str(self.left_live)
        return found


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: ends the sentence "the API key has ..."; retry_after_s: when trying again is sensible."""

    reason: str
    retry_after_s: float
    standing: Standing


@dataclass(slots=True)
class _Account:
    begun_s: deque[float] = field(default_factory=deque)
    num_live: int = 0


class Limiter:
    """`take` before a request, `give_back` after it when it was let through. clock: seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def take(self, name: str, limits: Limits) -> Standing | Refusal:
        account, now_s = self._accounts.setdefault(name, _Account()), self._clock()
        while account.begun_s and account.begun_s[0] <= now_s - WINDOW_S:
            account.begun_s.popleft()
        refused = self._refusal(account, limits, now_s)
        if refused is not None:
            return refused
        if limits.requests_per_minute:
            account.begun_s.append(now_s)
        account.num_live += 1
        return self._standing(account, limits, now_s)

    def give_back(self, name: str) -> None:
        account = self._accounts[name]
        assert account.num_live > 0
        account.num_live -= 1
        if not account.num_live and not account.begun_s:
            del self._accounts[name]

    def num_live(self, name: str) -> int:
        account = self._accounts.get(name)
        return account.num_live if account else 0

    def _refusal(self, account: _Account, limits: Limits, now_s: float) -> Refusal | None:
        rate, most = limits.requests_per_minute, limits.max_live
        if rate and len(account.begun_s) >= rate:
            wait_s = account.begun_s[len(account.begun_s) - rate] + WINDOW_S - now_s
            return Refusal(
                f"begun its {rate} requests of the last minute", wait_s, self._standing(account, limits, now_s)
            )
        if most and account.num_live >= most:
            return Refusal(f"its {most} requests running", 1.0, self._standing(account, limits, now_s))
        return None

    def _standing(self, account: _Account, limits: Limits, now_s: float) -> Standing:
        reset_s = account.begun_s[-1] + WINDOW_S - now_s if account.begun_s else 0.0
        return Standing(
            limits,
            max(0, limits.requests_per_minute - len(account.begun_s)),
            max(0, limits.max_live - account.num_live),
            reset_s,
        )
