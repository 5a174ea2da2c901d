"""The live requests behind one answer: one per choice. Every request ends exactly once: with its last delta, with an error when
the engine failed, or with one cancel when the client went. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType

from scheduler.errors import Cancelled, ServingError, revive
from scheduler.wire import Delta, FinishReason, Request
from services.gateway.groups import Engines
from services.gateway.subscription import Inbox, Subscription

_SHORTEST_TIMEOUT_S = 0.001


class LiveRequest:
    """One request at the engine, from `open` to `close`."""

    def __init__(self, client: Engines, request: Request, arrived: asyncio.Event) -> None:
        self._client = client
        self._request = request
        self._inbox = Inbox(arrived)
        self._submitted: asyncio.Task[Subscription] | None = None
        self._cancelled = False
        self.ended = False

    @property
    def is_new(self) -> bool:
        """It was never handed over."""
        return self._submitted is None

    @property
    def has_mail(self) -> bool:
        return len(self._inbox) > 0

    async def open(self, timeout_s: float | None) -> None:
        """Hands the request over; raises Rejected kinds. Whoever is cancelled here still has to `close`."""
        request = dataclasses.replace(self._request, timeout_s=timeout_s)
        self._submitted = asyncio.create_task(self._client.submit(request, self._inbox))
        await asyncio.shield(self._submitted)

    def take(self) -> list[Delta]:
        """What has arrived. Raises how the request failed, after everything that came before the failure was taken."""
        deltas: list[Delta] = []
        while (item := self._inbox.peek()) is not None:
            failure = self._failure(item)
            if failure is not None and deltas:
                break
            self._inbox.pop()
            if failure is not None:
                self.ended = True
                raise failure
            assert isinstance(item, Delta)
            self.ended = self.ended or item.finish_reason is not None
            deltas.append(item)
        return deltas

    def cancel(self) -> None:
        """Asks the engine to stop, once; the last delta may still be taken."""
        if self._submitted is not None and not self._cancelled and not self.ended:
            self._cancelled = True
            self._client.cancel_later(self._request.request_id, self._submitted)

    def close(self) -> None:
        if self._submitted is None:
            return
        if self._submitted.done() and (self._submitted.cancelled() or self._submitted.exception() is not None):
            return
        if self.ended:
            self._submitted.result().remove(self._request.request_id)
        else:
            self.cancel()

    def _failure(self, item: Delta | ServingError) -> ServingError | None:
        if isinstance(item, ServingError):
            return item
        if item.finish_reason is FinishReason.ERROR:
            return revive(*(item.error or ("InternalFault", "the engine gave no reason")))
        if item.finish_reason is FinishReason.CANCELLED and not self._cancelled:
            return Cancelled("the engine cancelled the request")
        return None


class LiveChoices:
    """All choices of one answer, to be used with `async with`; leaving the block early cancels what still runs.

    `num_choices` requests in a row have the same prompt. The first of them is submitted at once, the others when its first
    delta has come: its prompt's blocks are in the prefix cache by then, and each prompt is computed once. A deadline counts
    from the first submit.
    """

    def __init__(self, client: Engines, requests: Sequence[Request], num_choices: int = 1) -> None:
        self._arrived = asyncio.Event()
        self._requests = requests
        self._each = [LiveRequest(client, request, self._arrived) for request in requests]
        self._num_choices = num_choices
        self._began_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LiveChoices:
        try:
            for leader in range(0, len(self._each), self._num_choices):
                await self._open(leader)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, list[Delta]]]:
        """(index, deltas) of every choice that has some, waiting for the first; empty after `timeout_s`. Raises how a
        request failed."""
        loop = asyncio.get_running_loop()
        late_s = None if timeout_s is None else loop.time() + timeout_s
        # What has arrived rings: without a ring there is nothing to look for.
        while not (self._arrived.is_set() and (taken := self._take_ready())):
            if late_s is not None:
                if loop.time() >= late_s:
                    return []
                self._look_again(loop, late_s)
            await self._arrived.wait()
        if self._num_choices > 1:
            for index, _ in taken:
                await self._open_followers(index)
        return taken

    def _look_again(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        """Whoever waits looks again at that time, or earlier. One timer lasts for many chunks: this runs for each."""
        if self._timer is not None and self._timer.when() <= at_s:
            return
        self._stop_timer()
        self._timer = loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._arrived.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cancel(self, index: int) -> None:
        self._each[index].cancel()

    def _take_ready(self) -> list[tuple[int, list[Delta]]]:
        self._arrived.clear()
        taken = [(index, deltas) for index, each in enumerate(self._each) if (deltas := each.take())]
        for each in self._each:
            if each.has_mail:
                self._arrived.set()
        return taken

    async def _open_followers(self, leader: int) -> None:
        if leader % self._num_choices == 0 and self._each[leader + 1].is_new:
            for index in range(leader + 1, leader + self._num_choices):
                await self._open(index)

    async def _open(self, index: int) -> None:
        timeout_s = self._requests[index].timeout_s
        if timeout_s is not None:
            timeout_s = max(_SHORTEST_TIMEOUT_S, timeout_s - (time.monotonic() - self._began_s))
        await self._each[index].open(timeout_s)

    def _close(self) -> None:
        self._stop_timer()
        for each in self._each:
            each.close()
