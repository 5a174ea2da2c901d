"""Several engine groups behind one gateway: where requests go, and what happens when a group is full, starts or is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import httpx
import pytest

from scheduler.errors import Overloaded
from scheduler.wire import Request, SamplingParams
from services.gateway.app import create_app
from services.gateway.groups import EngineGroups
from services.gateway.subscription import Inbox

CHAT = "/v1/chat/completions"


@pytest.fixture
def serve(bench, make_script):
    """serve(num_groups, script) as a context: a client, and each group's scheduler."""

    @asynccontextmanager
    async def running(count, script=None, ready=None):
        script = script or make_script(bench.rounds("Hi"), step_s=0.005)
        groups = {str(number): bench.scheduler(script) for number in range(count)}
        for name, scheduler in groups.items():
            scheduler.ready = ready is None or name in ready
        app = create_app(groups, bench.config)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        ):
            await app.state.gateway.loaded.wait()
            yield client, groups

    return running


def where(groups) -> Counter[str]:
    return Counter({name: len(scheduler.requests) for name, scheduler in groups.items()})


def asked(body, text: str):
    return body(messages=[{"role": "user", "content": text}])


async def test_a_conversation_stays_where_its_prefix_is_and_others_spread(serve, body):
    async with serve(3) as (client, groups):
        for _ in range(5):
            assert (await client.post(CHAT, json=asked(body, "the same beginning"))).status_code == 200
        assert sorted(where(groups).values()) == [0, 0, 5]
        for number in range(60):
            await client.post(CHAT, json=asked(body, f"{number} is another question"))
        assert min(where(groups).values()) >= 8


async def test_load_goes_elsewhere_when_the_preferred_group_has_more_than_its_share(serve, body, make_script, bench):
    slow = make_script(bench.rounds("Hi"), step_s=0.05)
    async with serve(2, slow) as (client, groups):
        answers = await asyncio.gather(*(client.post(CHAT, json=asked(body, "all the same")) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        fewer, more = sorted(where(groups).values())
        assert fewer + more == 20 and more - fewer <= 6


async def test_a_full_group_hands_on_and_only_when_all_are_full_is_a_request_refused(serve, body, make_script, bench):
    full = set("01")

    def script_of(request):
        return make_script(bench.rounds("Hi"))

    async with serve(2, script_of) as (client, groups):
        for name in sorted(full):
            groups[name].answer = lambda request: make_script(failure=Overloaded("the queue is full"))
        refused = await client.post(CHAT, json=body())
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert where(groups) == {"0": 1, "1": 1}
        groups["1"].answer = script_of
        assert [(await client.post(CHAT, json=body())).status_code for _ in range(4)] == [200] * 4


async def test_a_group_that_is_gone_costs_one_attempt_and_no_request(serve, body):
    async with serve(2) as (client, groups):

        async def lost(subscriber):
            raise ConnectionError("gone")
            yield

        groups["0"].subscribe = lost
        answers = [await client.post(CHAT, json=asked(body, f"question {number}")) for number in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert where(groups) == {"0": 0, "1": 8}
        assert (await client.get("/ready")).status_code == 200


async def test_it_is_ready_with_the_first_group_and_tells_which_do_not_answer(serve, body):
    async with serve(2, ready={"1"}) as (client, groups):
        assert (await client.get("/ready")).status_code == 200
        page = (await client.get("/metrics")).text
        assert 'dspark_scheduler_up{group="0",model="tiny-chat"} 0.0' in page
        assert 'dspark_scheduler_up{group="1",model="tiny-chat"} 1.0' in page
        for scheduler in groups.values():
            scheduler.healthy = False
        assert (await client.get("/ready")).status_code == 503


async def test_a_cancel_finds_the_group_also_when_it_comes_before_the_submit_has_arrived(bench, make_script):
    hanging = make_script(bench.rounds("Hello there, how are you"), step_s=0.01, hang=True)
    groups = {str(number): bench.scheduler(hanging) for number in range(3)}
    engines = EngineGroups(groups, bench.config)
    for number in range(12):
        request = Request(f"r{number}", (number, 1, 2), SamplingParams(max_tokens=50), subscriber="")
        submitted = asyncio.create_task(engines.submit(request, Inbox(asyncio.Event())))
        if number % 2:
            await submitted
        engines.cancel_later(request.request_id, submitted)
    await engines.stop()
    assert min(where(groups).values()) > 0
    for scheduler in groups.values():
        assert scheduler.cancels == Counter(request.request_id for request in scheduler.requests)
    assert engines.num_live == 0
