"""Requests share a call to their scheduler, and each hears its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from scheduler.errors import Overloaded, SchedulerLost, ServingError
from scheduler.wire import Request, SamplingParams
from services.submissions import Submissions


def request(name: str, num_prompt: int = 3) -> Request:
    return Request(name, tuple(range(num_prompt)), SamplingParams(max_tokens=4))


class Far:
    """A scheduler whose calls take until `answer` is set; it refuses names that begin with `full`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.cancelled: list[str] = []
        self.answer = asyncio.Event()
        self.failure: Exception | None = None

    async def submit_all(self, requests: Sequence[Request]) -> list[ServingError | None]:
        names = [each.request_id for each in requests]
        self.calls.append(names)
        await self.answer.wait()
        if self.failure is not None:
            raise self.failure
        return [Overloaded(f"{name}: the queue is full") if name.startswith("full") else None for name in names]

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_that_come_while_a_call_is_under_way_share_the_next_one():
    far = Far()
    submissions = Submissions(far.submit_all, far.cancel)
    first = asyncio.create_task(submissions.submit(request("a")))
    await turns()
    others = [asyncio.create_task(submissions.submit(request(name))) for name in "bcd"]
    await turns()
    assert far.calls == [["a"]]
    far.answer.set()
    await asyncio.gather(first, *others)
    assert far.calls == [["a"], ["b", "c", "d"]]


async def test_each_request_hears_its_own_refusal():
    far = Far()
    far.answer.set()
    submissions = Submissions(far.submit_all, far.cancel)
    names = ["a", "full-1", "b", "full-2"]
    answers = await asyncio.gather(*(submissions.submit(request(name)) for name in names), return_exceptions=True)
    assert far.calls == [names]
    assert [str(answer) for answer in answers] == [
        "None",
        "full-1: the queue is full",
        "None",
        "full-2: the queue is full",
    ]


async def test_a_call_that_fails_fails_its_requests_and_no_others():
    far = Far()
    far.failure = SchedulerLost("gone")
    submissions = Submissions(far.submit_all, far.cancel)
    lost = [asyncio.create_task(submissions.submit(request(name))) for name in "ab"]
    await turns()
    far.answer.set()
    for each in lost:
        with pytest.raises(SchedulerLost, match="gone"):
            await each
    far.failure = None
    await submissions.submit(request("c"))
    assert far.calls == [["a", "b"], ["c"]]


async def test_a_request_taken_after_its_submitter_gave_up_is_cancelled_and_the_others_stay():
    far = Far()
    submissions = Submissions(far.submit_all, far.cancel)
    names = ["a", "b", "full"]
    tasks = [asyncio.create_task(submissions.submit(request(name))) for name in names]
    await turns()
    for given_up in (tasks[0], tasks[2]):
        given_up.cancel()
    await turns()
    far.answer.set()
    await tasks[1]
    await turns()
    assert far.cancelled == ["a"]


async def test_long_prompts_do_not_share_a_call():
    far = Far()
    far.answer.set()
    submissions = Submissions(far.submit_all, far.cancel)
    sizes = {"a": 10_000, "b": 6_000, "c": 1_000, "huge": 100_000, "d": 1}
    await asyncio.gather(*(submissions.submit(request(name, size)) for name, size in sizes.items()))
    assert far.calls == [["a", "b"], ["c"], ["huge"], ["d"]]
