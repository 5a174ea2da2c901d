"""Who is waiting for a place: first come, first served, with a limit. Must not know blocks or steps.

Requests that lost their place come back to the front; they were accepted once and are never refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from scheduler.errors import Overloaded
from scheduler.live import Live

_WINDOW = 32
_SHORTEST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0


class WaitingQueue:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: OrderedDict[str, Live] = OrderedDict()
        self._departures: deque[float] = deque(maxlen=_WINDOW)
        self._busy_since_s = 0.0
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Live]:
        return iter(self._queue.values())

    def get(self, request_id: str) -> Live | None:
        return self._queue.get(request_id)

    @property
    def head(self) -> Live | None:
        return next(iter(self._queue.values()), None)

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
        self._queue[live.request.request_id] = live

    def push_front(self, live: Live) -> None:
        self._queue[live.request.request_id] = live
        self._queue.move_to_end(live.request.request_id, last=False)

    def pop(self, now: float) -> Live:
        _, live = self._queue.popitem(last=False)
        self._departures.append(now)
        self._num_refused = max(0, self._num_refused - 1)
        return live

    def remove(self, request_id: str) -> Live | None:
        return self._queue.pop(request_id, None)

    def _retry_after_s(self, now: float) -> float:
        """When this one's turn may come: the n-th client refused waits for n departures at the pace of late."""
        since = self._departures[0] if len(self._departures) == _WINDOW else self._busy_since_s
        pace_s = (now - since) / max(1, len(self._departures))
        return min(max(pace_s * self._num_refused, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
