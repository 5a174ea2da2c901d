"""Deltas on their way to a subscriber: one list per step, kept until it is taken. Writing never blocks.

The bound is elsewhere: there are at most as many requests as may live and wait, and each ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from scheduler.wire import Delta


class Mailbox:
    """One writer, one reader at a time."""

    def __init__(self) -> None:
        self._lists: deque[list[Delta]] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, deltas: list[Delta]) -> None:
        self._lists.append(deltas)
        self._arrived.set()

    def close(self) -> None:
        """Nothing more will come; what is there may still be taken."""
        self._closed = True
        self._arrived.set()

    async def take(self) -> list[Delta] | None:
        """The oldest list, waiting for one; None after the last."""
        while not self._lists:
            if self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._lists.popleft()


class Subscription(AsyncIterator[list[Delta]]):
    """One reader's hold on a mailbox, from the moment it is made. `on_close` is called once: when it is closed, when its
    reader is cancelled while waiting, or when it is thrown away."""

    def __init__(self, mailbox: Mailbox, on_close: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._on_close: Callable[[], None] | None = on_close
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> list[Delta]:
        try:
            deltas = await self._mailbox.take()
        except BaseException:
            await self.aclose()
            raise
        if deltas is None:
            await self.aclose()
            raise StopAsyncIteration
        return deltas

    async def aclose(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __del__(self) -> None:
        # The collector may run in the middle of a step, so the closing waits for its turn.
        if self._on_close is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_close)
