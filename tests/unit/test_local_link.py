"""The connection between a gateway and a scheduler of one machine: each request hears its own answer, deltas keep their order,
and either side that goes ends it for the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
from collections.abc import AsyncIterator

import pytest

from scheduler.errors import BadParams, Overloaded, SchedulerLost, ServingError
from scheduler.wire import Delta, FinishReason, Request, SamplingParams, StepTimes, TokenLogprob, Usage
from services.local_link import Door, Link, Visitor
from tests.waiting import until


class Far:
    """A scheduler: it refuses names that begin with `full`, and does not answer `slow` ones before `go`."""

    def __init__(self) -> None:
        self.taken: list[Request] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()

    async def refusal(self, request: Request) -> ServingError | None:
        if request.request_id.startswith("slow"):
            await self.go.wait()
        if request.request_id.startswith("full"):
            return Overloaded(f"{request.request_id}: the queue is full")
        if request.request_id.startswith("bad"):
            return BadParams("no such token", "stop_token_ids")
        self.taken.append(request)
        return None

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def request(name: str, num_prompt: int = 3) -> Request:
    return Request(name, tuple(range(num_prompt)), SamplingParams(max_tokens=4))


@contextlib.asynccontextmanager
async def opened(far: Far) -> AsyncIterator[Door]:
    door = Door(far.refusal, far.cancel)
    await door.open()
    try:
        yield door
    finally:
        await door.close()


@contextlib.asynccontextmanager
async def linked(far: Far) -> AsyncIterator[tuple[Link, Visitor]]:
    async with opened(far) as door:
        coming = asyncio.create_task(Link.connect(door.path, "gw"))
        async with door.visit("gw") as visitor:
            link = await coming
            yield link, visitor
            link.close()


async def test_each_request_hears_its_own_answer_and_none_waits_for_a_slow_one():
    far = Far()
    async with linked(far) as (link, _):
        slow = asyncio.create_task(link.submit(request("slow")))
        names = ["a", "full-1", "b", "bad"]
        answers = await asyncio.gather(*(link.submit(request(name)) for name in names), return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None), Overloaded, type(None), BadParams]
        assert str(answers[1]) == "full-1: the queue is full" and answers[3].param == "stop_token_ids"
        assert far.taken == [request("a"), request("b")] and not slow.done()
        far.go.set()
        await slow


async def test_deltas_keep_their_order_and_arrive_whole_whatever_their_size():
    lists = [[Delta(f"r{number}", tuple(range(size)))] for number, size in enumerate((0, 1, 300_000, 7, 2))]
    async with linked(Far()) as (link, visitor):
        for each in lists:
            visitor.send(each)
        visitor.close()
        assert [deltas async for deltas in link.deltas()] == lists


async def test_a_long_prompt_arrives_whole():
    far = Far()
    async with linked(far) as (link, _):
        await link.submit(request("long", 200_000))
        assert far.taken == [request("long", 200_000)]


async def test_a_gateway_that_does_not_read_makes_the_scheduler_wait_and_nothing_is_lost():
    lists = [[Delta(f"r{number}", tuple(range(100_000)))] for number in range(8)]

    async def deliver(visitor: Visitor) -> None:
        for each in lists:
            visitor.send(each)
            await visitor.when_writable()

    async with linked(Far()) as (link, visitor):
        assert link._transport is not None
        link._transport.pause_reading()
        delivering = asyncio.create_task(deliver(visitor))
        await asyncio.sleep(0.05)
        assert not delivering.done()
        link._transport.resume_reading()
        await delivering
        visitor.close()
        assert [deltas async for deltas in link.deltas()] == lists


async def test_a_request_taken_after_its_submitter_gave_up_is_cancelled_and_a_refused_one_is_not():
    far = Far()
    async with linked(far) as (link, _):
        tasks = [asyncio.create_task(link.submit(request(name))) for name in ("slow-1", "slow-2", "full")]
        await asyncio.sleep(0)
        for given_up in (tasks[0], tasks[2]):
            given_up.cancel()
        far.go.set()
        await tasks[1]
        await until(lambda: far.cancelled)
        assert far.cancelled == ["slow-1"]


async def test_a_scheduler_that_goes_fails_who_waits_for_it_and_ends_the_deltas():
    async with linked(Far()) as (link, visitor):
        waiting = asyncio.create_task(link.submit(request("slow")))
        await asyncio.sleep(0.01)
        visitor.close()
        with pytest.raises(SchedulerLost):
            await waiting
        assert [deltas async for deltas in link.deltas()] == []
        with pytest.raises(SchedulerLost):
            await link.submit(request("late"))


async def test_a_gateway_that_goes_is_noticed_at_once_and_also_by_who_asks_late():
    async with linked(Far()) as (link, visitor):
        heard: list[str] = []
        visitor.when_ended(lambda: heard.append("gone"))
        link.close()
        await until(lambda: heard)
        visitor.when_ended(lambda: heard.append("late"))
        visitor.send([Delta("r", (1,))])
        await visitor.when_writable()
        assert heard == ["gone", "late"]


async def test_only_an_expected_gateway_comes_in_and_one_that_does_not_come_is_not_awaited_for_ever():
    async with opened(Far()) as door:
        stranger = await Link.connect(door.path, "stranger")
        assert [deltas async for deltas in stranger.deltas()] == []
        with pytest.raises(SchedulerLost, match="gw did not come"):
            async with door.visit("gw", timeout_s=0.01):
                raise AssertionError


async def test_only_this_user_may_come_in_and_a_closed_door_leaves_nothing_behind():
    async with opened(Far()) as door:
        assert door._folder is not None
        folder = door._folder
        assert folder.stat().st_mode & 0o077 == 0 and door.path
    assert not folder.exists() and door.path == ""


def test_a_delta_is_the_same_after_the_way_with_every_field_it_may_have():
    full = Delta(
        "r",
        (1, 2),
        True,
        7,
        5,
        1,
        FinishReason.ERROR,
        Usage(3, 2, 1),
        ("InternalFault", "no"),
        (TokenLogprob(-0.5, ((1, -0.5),)),) * 2,
        StepTimes(*range(len(dataclasses.fields(StepTimes)))),
    )
    assert all(getattr(full, each.name) for each in dataclasses.fields(Delta))
    assert pickle.loads(pickle.dumps(full)) == full
