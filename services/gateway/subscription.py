"""One standing connection to one scheduler, and the inboxes of the requests that live there. Knows no HTTP and no text."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Protocol

from scheduler.errors import SchedulerLost, ServingError
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, Request
from services.model_card import ModelCard

logger = logging.getLogger(__name__)


class Scheduler(Protocol):
    """What a gateway asks of an engine: an object in this process or a handle over the network."""

    async def card(self) -> ModelCard:
        """Raises SchedulerLost, with the reason, until the engine is ready."""
        ...

    async def submit(self, request: Request) -> None:
        """Raises Rejected kinds; SchedulerLost when `request.subscriber` is not subscribed."""
        ...

    async def cancel(self, request_id: str) -> None: ...

    def subscribe(self, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        """One list per step. The first list is empty: it says that the subscription stands. Closing it cancels the
        subscriber's requests."""
        ...

    async def queue_position(self, request_id: str) -> int | None:
        """0: it runs; n: the n-th of those waiting; None: there is no such request."""
        ...

    async def snapshot(self) -> SchedulerStats: ...

    async def check_health(self) -> None: ...


class Inbox:
    """What arrived for one request and was not taken yet: deltas, then perhaps how it failed. `arrived` is set by each
    arrival; several inboxes may share it, and whoever waits for it clears it."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self._items: deque[Delta | ServingError] = deque()
        self._arrived = arrived

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Delta | ServingError) -> None:
        self._items.append(item)
        self._arrived.set()

    def peek(self) -> Delta | ServingError | None:
        return self._items[0] if self._items else None

    def pop(self) -> None:
        self._items.popleft()

    def clear(self) -> None:
        self._items.clear()


class Subscription:
    """One standing connection to one scheduler, and the inboxes of the requests that live there.

    It ends by itself after `idle_s` without requests: a scheduler that is being replaced can only go when nobody
    listens to it any more. `retire` makes it end with its last request.
    """

    def __init__(self, scheduler: Scheduler, idle_s: float) -> None:
        self.name = f"gateway-{uuid.uuid4().hex[:12]}"
        self.scheduler = scheduler
        self._idle_s = idle_s
        self._inboxes: dict[str, Inbox] = {}
        self._stands = asyncio.Event()
        self._idle_timer: asyncio.TimerHandle | None = None
        # it serves every request, and is about none: not about the one that happens to be here first
        self._pump = asyncio.create_task(self._run(), context=contextvars.Context())

    @property
    def ended(self) -> bool:
        return self._pump.done()

    @property
    def num_live(self) -> int:
        return len(self._inboxes)

    def has(self, request_id: str) -> bool:
        return request_id in self._inboxes

    async def wait_until_it_stands(self, timeout_s: float) -> None:
        if self._stands.is_set() and not self.ended:
            return
        waiter = asyncio.create_task(self._stands.wait())
        try:
            await asyncio.wait({waiter, self._pump}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self.ended or not self._stands.is_set():
            raise SchedulerLost("the scheduler is not available")

    def add(self, request_id: str, inbox: Inbox) -> None:
        self._inboxes[request_id] = inbox
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def remove(self, request_id: str) -> None:
        known = self._inboxes.pop(request_id, None) is not None
        if known and not self._inboxes and not self.ended:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._pump.cancel)

    def retire(self) -> None:
        self._idle_s = 0.0
        if not self._inboxes:
            self._pump.cancel()

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.wait({self._pump})

    async def _run(self) -> None:
        reason: ServingError = SchedulerLost("the engine stopped while this request ran")
        try:
            async with contextlib.aclosing(self.scheduler.subscribe(self.name)) as stream:
                async for deltas in stream:
                    self._stands.set()
                    self._deliver(deltas)
        except ServingError as error:
            reason = error
        except Exception as error:
            logger.warning("the subscription to the scheduler broke: %s", error)
        finally:
            for inbox in self._inboxes.values():
                inbox.put(reason)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)
