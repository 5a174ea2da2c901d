"""The gateway's side of the scheduler: one subscription for all its requests, demultiplexed to one inbox per request.

Owns: connecting, reconnecting, small calls bounded in time, and one cancel for each request whose client went. Knows no HTTP
and no text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from scheduler.errors import SchedulerLost, ServingError
from scheduler.stats import SchedulerStats
from scheduler.wire import Request
from services.gateway.config import GatewayConfig
from services.gateway.subscription import Inbox, Scheduler, Subscription
from services.gateway.within import within
from services.model_card import ModelCard

logger = logging.getLogger(__name__)
T = TypeVar("T")


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

    @property
    def num_background(self) -> int:
        """Cancels under way."""
        return len(self._background)

    def has(self, request_id: str) -> bool:
        return any(subscription.has(request_id) for subscription in self._subscriptions)

    async def card(self) -> ModelCard:
        return await self._bounded(self._scheduler.card())

    async def snapshot(self) -> SchedulerStats:
        return await self._bounded(self._scheduler.snapshot())

    async def check_health(self) -> None:
        await self._bounded(self._scheduler.check_health())

    async def queue_position(self, request_id: str) -> int | None:
        """0: it runs; n: the n-th of those waiting; None: nobody knows."""
        try:
            return await self._bounded(self._scheduler.queue_position(request_id))
        except ServingError:
            return None

    async def stop(self) -> None:
        """Waits for cancels under way, then closes the subscriptions, which cancels whatever still runs."""
        if self._background:
            await asyncio.wait(self._background, timeout=self._config.call_timeout_s)
        for subscription in list(self._subscriptions):
            await subscription.close()

    async def submit(self, request: Request, inbox: Inbox) -> Subscription:
        """Hands the request over. Tries once more, in what is left of the time, when the scheduler turns out to be a new one
        that does not know our subscription."""
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        try:
            return await self._submit_once(request, inbox, deadline_s)
        except SchedulerLost:
            if time.monotonic() >= deadline_s:
                raise
            self._retire_current()
            return await self._submit_once(request, inbox, deadline_s)

    async def _submit_once(self, request: Request, inbox: Inbox, deadline_s: float) -> Subscription:
        subscription = self._subscription()
        inbox.clear()
        subscription.add(request.request_id, inbox)
        try:
            await subscription.wait_until_it_stands(deadline_s - time.monotonic())
            addressed = dataclasses.replace(request, subscriber=subscription.name)
            await self._bounded(self._scheduler.submit(addressed), deadline_s - time.monotonic())
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
            return await within(self._config.call_timeout_s if timeout_s is None else timeout_s, call)
        except TimeoutError:
            raise SchedulerLost("the scheduler does not answer: it starts, or the server shuts down") from None

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
            await self._bounded(subscription.scheduler.cancel(request_id))
        except Exception as error:
            logger.warning("a cancel did not reach the scheduler: %s", error, extra={"request_ids": (request_id,)})
        finally:
            subscription.remove(request_id)
