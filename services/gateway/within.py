"""A bound in time for an await that seldom has to wait: what is done at once is spared the timer. Knows nothing else."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`; raises TimeoutError and cancels it when it takes longer."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return end.value
    async with asyncio.timeout(limit_s):
        return await _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """What is left of an await that was begun by hand and now waits for `waits_for`."""
    while True:
        try:
            yield waits_for
        except BaseException as error:
            resume: Callable[[], Any] = partial(steps.throw, error)
        else:
            resume = partial(next, steps)
        try:
            waits_for = resume()
        except StopIteration as end:
            return end.value
