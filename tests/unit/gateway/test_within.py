"""`within` does what asyncio.timeout does, and starts no timer for what is done at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.within import within

pytestmark = pytest.mark.usefixtures("in_virtual_time")

SHORT_S = 0.02


async def plainly(limit_s: float, work: Awaitable[str]) -> str:
    """The twin."""
    async with asyncio.timeout(limit_s):
        return await work


async def done_at_once(seen: list[str]) -> str:
    return "at once"


async def several_waits(seen: list[str]) -> str:
    for number in range(3):
        seen.append(f"wait {number}")
        await asyncio.sleep(0)
    await asyncio.sleep(SHORT_S / 10)
    return "waited"


async def fails_at_once(seen: list[str]) -> str:
    raise OSError("gone")


async def fails_after_a_wait(seen: list[str]) -> str:
    await asyncio.sleep(0)
    raise OSError("gone")


async def too_slow(seen: list[str]) -> str:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise
    finally:
        seen.append("cleaned up")
    return "slept"


async def cleans_up_slowly(seen: list[str]) -> str:
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(SHORT_S / 10)
        seen.append("cleaned up")
    return "slept"


async def will_not_be_cancelled(seen: list[str]) -> str:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        seen.append("cancelled")
        await asyncio.sleep(0)
    return "stubborn"


async def turns_it_into_another_error(seen: list[str]) -> str:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        raise OSError("broken") from None
    return "slept"


async def outcome_of(bounded: Callable, work: Callable, cancel_s: float | None) -> tuple[object, ...]:
    """What came of it, what the work saw, and whether its task still counts as being cancelled."""
    seen: list[str] = []

    async def run() -> tuple[object, ...]:
        try:
            result: object = await bounded(SHORT_S if cancel_s is None else 30, work(seen))
        except BaseException as error:
            result = type(error), str(error)
        task = asyncio.current_task()
        assert task is not None
        return result, task.cancelling()

    task = asyncio.create_task(run())
    if cancel_s is not None:
        await asyncio.sleep(cancel_s)
        task.cancel()
    return *await task, *seen


@pytest.mark.parametrize(
    "work",
    [
        done_at_once,
        several_waits,
        fails_at_once,
        fails_after_a_wait,
        too_slow,
        cleans_up_slowly,
        will_not_be_cancelled,
        turns_it_into_another_error,
    ],
)
async def test_it_ends_as_with_asyncio_timeout(work):
    assert await outcome_of(within, work, None) == await outcome_of(plainly, work, None)


@pytest.mark.parametrize("work", [too_slow, cleans_up_slowly, will_not_be_cancelled, turns_it_into_another_error])
async def test_a_cancellation_reaches_the_work_as_with_asyncio_timeout(work):
    found = await outcome_of(within, work, SHORT_S)
    assert found == await outcome_of(plainly, work, SHORT_S)
    assert found[1] == 1


async def test_only_what_has_to_wait_starts_a_timer(monkeypatch):
    timers = []
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    monkeypatch.setattr(
        loop, "call_at", lambda when, *args, **named: timers.append(when) or call_at(when, *args, **named)
    )
    assert await within(5, done_at_once([])) == "at once"
    assert timers == []
    began_s = loop.time()

    async def turn() -> str:
        await asyncio.sleep(0)
        return "later"

    assert await within(5, turn()) == "later"
    assert len(timers) == 1 and began_s + 4.9 < timers[0] < began_s + 10
