"""The gateway's side of the scheduler: one subscription for all its requests, demultiplexed to one inbox per request.

Owns: connecting, reconnecting, and that every request ends exactly once: with its last delta, with an error when the
scheduler went away, or with one cancel when the client did. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from scheduler.errors import Cancelled, SchedulerLost, ServingError, revive
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, FinishReason, Request
from services.gateway.config import GatewayConfig
from services.model_card import ModelCard

logger = logging.getLogger(__name__)
T = TypeVar("T")


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

    async def snapshot(self) -> SchedulerStats: ...

    async def check_health(self) -> None: ...


class Inbox:
    """What arrived for one request and was not taken yet: deltas, then perhaps how it failed."""

    def __init__(self) -> None:
        self._items: deque[Delta | ServingError] = deque()
        self._arrived = asyncio.Event()

    def put(self, item: Delta | ServingError) -> None:
        self._items.append(item)
        self._arrived.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Until something is there; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._arrived.wait()

    def peek(self) -> Delta | ServingError | None:
        return self._items[0] if self._items else None

    def pop(self) -> None:
        self._items.popleft()
        if not self._items:
            self._arrived.clear()

    def clear(self) -> None:
        self._items.clear()
        self._arrived.clear()


class Subscription:
    """One standing connection to one scheduler, and the inboxes of the requests that live there.

    It ends by itself after `idle_s` without requests: a scheduler that is being replaced can only go when nobody
    listens to it any more. `retire` makes it end with its last request.
    """

    def __init__(self, scheduler: Scheduler, idle_s: float) -> None:
        self.name = f"gateway-{uuid.uuid4().hex[:12]}"
        self._idle_s = idle_s
        self._inboxes: dict[str, Inbox] = {}
        self._stands = asyncio.Event()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._pump = asyncio.create_task(self._run(scheduler))

    @property
    def ended(self) -> bool:
        return self._pump.done()

    @property
    def num_live(self) -> int:
        return len(self._inboxes)

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

    async def _run(self, scheduler: Scheduler) -> None:
        reason: ServingError = SchedulerLost("the engine stopped while this request ran")
        try:
            async with contextlib.aclosing(scheduler.subscribe(self.name)) as stream:
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


class EngineClient:
    def __init__(self, scheduler: Scheduler, config: GatewayConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._current: Subscription | None = None
        self._subscriptions: set[Subscription] = set()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_live(self) -> int:
        return sum(subscription.num_live for subscription in self._subscriptions)

    def open(self, request: Request) -> Completion:
        """A request to run inside `async with`; leaving the block early cancels it."""
        return Completion(self, request)

    async def card(self) -> ModelCard:
        return await self._bounded(self._scheduler.card())

    async def snapshot(self) -> SchedulerStats:
        return await self._bounded(self._scheduler.snapshot())

    async def check_health(self) -> None:
        await self._bounded(self._scheduler.check_health())

    async def stop(self) -> None:
        """Waits for cancels under way, then closes the subscriptions, which cancels whatever still runs."""
        if self._background:
            await asyncio.wait(self._background, timeout=self._config.call_timeout_s)
        for subscription in list(self._subscriptions):
            await subscription.close()

    async def submit(self, request: Request, inbox: Inbox) -> Subscription:
        """Hands the request over. Tries once more when the scheduler turns out to be a new one that does not know our
        subscription."""
        try:
            return await self._submit_once(request, inbox)
        except SchedulerLost:
            self._retire_current()
            return await self._submit_once(request, inbox)

    async def _submit_once(self, request: Request, inbox: Inbox) -> Subscription:
        subscription = self._subscription()
        inbox.clear()
        subscription.add(request.request_id, inbox)
        try:
            await subscription.wait_until_it_stands(self._config.connect_timeout_s)
            addressed = dataclasses.replace(request, subscriber=subscription.name)
            await self._bounded(self._scheduler.submit(addressed), self._config.connect_timeout_s)
        except BaseException:
            subscription.remove(request.request_id)
            raise
        return subscription

    def _subscription(self) -> Subscription:
        self._subscriptions = {s for s in self._subscriptions if not s.ended}
        if self._current is None or self._current.ended:
            self._current = Subscription(self._scheduler, self._config.idle_s)
            self._subscriptions.add(self._current)
        return self._current

    def _retire_current(self) -> None:
        if self._current is not None:
            self._current.retire()
            self._current = None

    async def _bounded(self, call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        try:
            return await asyncio.wait_for(call, timeout_s or self._config.call_timeout_s)
        except TimeoutError:
            raise SchedulerLost("the scheduler does not answer; it may still be starting") from None

    def cancel_later(self, request_id: str, submitted: asyncio.Task[Subscription]) -> None:
        """One cancel in the background, after the submit arrived: the other order would leave the request running."""
        task = asyncio.create_task(self._cancel(request_id, submitted))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _cancel(self, request_id: str, submitted: asyncio.Task[Subscription]) -> None:
        try:
            subscription = await submitted
        except Exception:
            return
        try:
            await self._bounded(self._scheduler.cancel(request_id))
        except Exception as error:
            logger.warning("the cancel of %s did not reach the scheduler: %s", request_id, error)
        finally:
            subscription.remove(request_id)


class Completion:
    """One live request. `take` gives what the next round, or several, committed."""

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._inbox = Inbox()
        self._submitted: asyncio.Task[Subscription] | None = None
        self._ended = False
        self._cancelled = False

    async def __aenter__(self) -> Completion:
        self._submitted = asyncio.create_task(self._client.submit(self._request, self._inbox))
        try:
            await asyncio.shield(self._submitted)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._submitted is not None
        if self._ended:
            self._submitted.result().remove(self._request.request_id)
        else:
            self.cancel()

    async def take(self, timeout_s: float | None = None) -> list[Delta]:
        """What has arrived, waiting for the first; empty after `timeout_s`. Raises how the request failed, after
        everything that came before the failure was taken."""
        try:
            await self._inbox.wait(timeout_s)
        except TimeoutError:
            return []
        deltas: list[Delta] = []
        while (item := self._inbox.peek()) is not None:
            failure = self._failure(item)
            if failure is not None and deltas:
                break
            self._inbox.pop()
            if failure is not None:
                self._ended = True
                raise failure
            assert isinstance(item, Delta)
            self._ended = self._ended or item.finish_reason is not None
            deltas.append(item)
        return deltas

    def cancel(self) -> None:
        """Asks the engine to stop, once; the last delta may still be taken."""
        if not self._cancelled and not self._ended:
            self._cancelled = True
            assert self._submitted is not None
            self._client.cancel_later(self._request.request_id, self._submitted)

    def _failure(self, item: Delta | ServingError) -> ServingError | None:
        if isinstance(item, ServingError):
            return item
        if item.finish_reason is FinishReason.ERROR:
            return revive(*(item.error or ("InternalFault", "the engine gave no reason")))
        if item.finish_reason is FinishReason.CANCELLED and not self._cancelled:
            return Cancelled("the engine cancelled the request")
        return None
