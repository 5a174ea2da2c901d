"""Who is waiting for a place, in the order of `Live.rank`, with a limit. Must not know blocks or steps.

Requests that lost their place come back with the rank they had; they were accepted once and are never refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from scheduler.errors import Overloaded
from scheduler.live import Live, rank_of

_WINDOW = 32
_SHORTEST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0


class WaitingQueue:
    """max_wait_s: how long a request may wait for its first place; 0 is for ever."""

    def __init__(self, limit: int, max_wait_s: float = 0.0) -> None:
        self._limit = limit
        self._max_wait_s = max_wait_s
        self._queue: list[Live] = []
        self._by_id: dict[str, Live] = {}
        self._departures: deque[float] = deque(maxlen=_WINDOW)
        self._busy_since_s = 0.0
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._queue)

    def get(self, request_id: str) -> Live | None:
        return self._by_id.get(request_id)

    @property
    def head(self) -> Live | None:
        return self._queue[0] if self._queue else None

    def num_before(self, live: Live) -> int:
        """How many of those waiting come before `live`."""
        return bisect_left(self._queue, live.rank, key=rank_of)

    def check_room(self, now: float, *, num_places: int) -> None:
        """Raises Overloaded when the queue is full; `num_places` of those waiting are about to be served anyway."""
        if len(self._queue) < self._limit + num_places:
            return
        self._num_refused += 1
        wait_s = self._retry_after_s(now)
        raise Overloaded(
            f"{len(self._queue)} requests are waiting and the limit is {self._limit}; try again in {wait_s:.1f} s",
            wait_s,
        )

    def push(self, live: Live, now: float) -> None:
        if not self._queue:
            self._busy_since_s = now
            self._departures.clear()
            self._num_refused = 0
        self.put_back(live)

    def put_back(self, live: Live) -> None:
        """It had a place and lost it."""
        insort(self._queue, live, key=rank_of)
        self._by_id[live.request.request_id] = live

    def pop(self, now: float) -> Live:
        live = self._queue.pop(0)
        del self._by_id[live.request.request_id]
        self._departures.append(now)
        self._num_refused = max(0, self._num_refused - 1)
        return live

    def remove(self, request_id: str) -> Live | None:
        live = self._by_id.pop(request_id, None)
        if live is not None:
            del self._queue[self.num_before(live)]
        return live

    def overdue(self, now: float) -> list[Live]:
        """Those who have waited for a first place as long as one may."""
        if not self._max_wait_s:
            return []
        return [r for r in self._queue if r.admitted_s is None and now - r.arrival_s >= self._max_wait_s]

    def _retry_after_s(self, now: float) -> float:
        """When this one's turn may come: the n-th client refused waits for n departures at the pace of late."""
        since = self._departures[0] if len(self._departures) == _WINDOW else self._busy_since_s
        pace_s = (now - since) / max(1, len(self._departures))
        return min(max(pace_s * self._num_refused, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
