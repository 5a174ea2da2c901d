"""Requests on their way to a scheduler in another process: those that come while a call is under way share the next one.

A call costs both sides one to three milliseconds of a processor, whatever it carries, and requests come in crowds: those whose
answers ended in the same step. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from scheduler.errors import ServingError
from scheduler.wire import Request

# Small enough for every transport, whatever the prompts; a longer one goes alone.
_MOST_PROMPT_TOKENS = 16_384

SubmitAll = Callable[[Sequence[Request]], Awaitable[Sequence[ServingError | None]]]
Cancel = Callable[[str], Awaitable[None]]


class Submissions:
    """submit_all: one call; says of each request why it was refused, None if it was taken. cancel: for a request that was
    taken after its submitter had given up."""

    def __init__(self, submit_all: SubmitAll, cancel: Cancel) -> None:
        self._submit_all, self._cancel = submit_all, cancel
        self._waiting: deque[tuple[Request, asyncio.Future[None]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._cancels: set[asyncio.Task[None]] = set()

    async def submit(self, request: Request) -> None:
        """Returns once the request was taken; raises why not, or how the call failed."""
        taken = asyncio.get_running_loop().create_future()
        self._waiting.append((request, taken))
        if self._sender is None or self._sender.done():
            # it sends everybody's, and is about none: not about the one that happens to be here first
            self._sender = asyncio.create_task(self._send(), context=contextvars.Context())
        await taken

    async def _send(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                refusals = await self._submit_all([request for request, _ in batch])
            except Exception as error:
                for _, taken in batch:
                    _settle(taken, error)
                continue
            for (request, taken), refusal in zip(batch, refusals, strict=True):
                if not _settle(taken, refusal) and refusal is None:
                    self._cancel_later(request.request_id)

    def _cancel_later(self, request_id: str) -> None:
        async def cancel() -> None:
            await self._cancel(request_id)

        task = asyncio.create_task(cancel())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def _next_batch(self) -> list[tuple[Request, asyncio.Future[None]]]:
        batch: list[tuple[Request, asyncio.Future[None]]] = []
        num_tokens = 0
        while self._waiting:
            num_tokens += len(self._waiting[0][0].prompt_ids)
            if batch and num_tokens > _MOST_PROMPT_TOKENS:
                break
            batch.append(self._waiting.popleft())
        return batch


def _settle(taken: asyncio.Future[None], error: Exception | None) -> bool:
    """Whether anybody still waits for it."""
    if taken.done():
        return False
    if error is None:
        taken.set_result(None)
    else:
        taken.set_exception(error)
    return True
