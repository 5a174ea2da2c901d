"""Several choices of one prompt: shared blocks, seeds, interleaving, one ending for all."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.errors import Overloaded, VerifierLost
from scheduler.wire import FinishReason
from tests.openai_schemas import check_answer, check_chunk
from tests.virtual_time import virtual_time
from tests.waiting import until

CHAT = "/v1/chat/completions"


def at_of(request) -> int:
    return int(request.request_id.rpartition("-")[2])


async def test_the_others_are_submitted_when_the_first_has_its_first_token(bench, make_script, body, monkeypatch):
    script = make_script(bench.rounds("Hello there"), step_s=0.1)
    async with bench.serve(script) as (client, scheduler):
        virtual_time(monkeypatch)
        asking = asyncio.create_task(client.post(CHAT, json=body(n=3)))
        await until(lambda: scheduler.requests)
        await asyncio.sleep(0.09)
        assert len(scheduler.requests) == 1
        answer = (await asking).json()
    check_answer(answer)
    assert [at_of(request) for request in scheduler.requests] == [0, 1, 2]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hello there"}


async def test_each_choice_has_the_seed_that_follows(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(CHAT, json=body(n=3, seed=7))
        await client.post(CHAT, json=body(n=2, seed=2**63 - 1))
        await client.post(CHAT, json=body(n=2))
    seeds = [request.params.seed for request in scheduler.requests]
    assert seeds == [7, 8, 9, 2**63 - 1, -(2**63), None, None]


async def test_a_stream_interleaves_the_choices_and_each_is_whole(
    bench, make_script, body, events, choices, monkeypatch
):
    texts = ["Hello there", "The quick brown fox jumps", "naïve café 😀"]

    def answer(request):
        return make_script(bench.rounds(texts[at_of(request)]), step_s=0.005)

    async with bench.serve(answer) as (client, _):
        virtual_time(monkeypatch)
        request = body(n=3, stream=True, stream_options={"include_usage": True})
        *chunks, done = events((await client.post(CHAT, json=request)).text)
    assert done == "[DONE]"
    for chunk in chunks:
        check_chunk(chunk)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [{"role": "assistant", "content": ""}] * 3
    found = choices(chunks)
    assert [found[index]["text"] for index in range(3)] == texts
    assert {found[index]["finish_reason"] for index in range(3)} == {"stop"}
    order = [chunk["choices"][0]["index"] for chunk in chunks[3:-1]]
    assert order != sorted(order), "later choices do not wait for earlier ones"
    usage = chunks[-1]
    assert usage["choices"] == [] and usage["metrics"] is None
    assert usage["usage"]["completion_tokens"] == sum(len(bench.ids(text)) + 1 for text in texts)
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_a_stop_string_ends_one_choice_and_not_the_others(bench, make_script, body, monkeypatch):
    texts = ["one STOP two three four five six seven", "a longer text without it, as long as the first one"]

    def answer(request):
        return make_script(bench.rounds(texts[at_of(request)]), step_s=0.002)

    async with bench.serve(answer) as (client, scheduler):
        virtual_time(monkeypatch)
        found = (await client.post(CHAT, json=body(n=2, stop="STOP"))).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == ["one ", texts[1]]
    assert [at_of(request) for request in scheduler.requests if scheduler.cancels[request.request_id]] == [0]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_cancels_all_choices(bench, make_script, body, stream):
    script = make_script(bench.rounds("Hi there", eos=False), hang=True)
    async with bench.serve(script) as (client, scheduler):
        task = asyncio.create_task(client.post(CHAT, json=body(n=4, stream=stream)))
        await until(lambda: len(scheduler.requests) == 4)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: sum(scheduler.cancels.values()) == 4)
    assert set(scheduler.cancels.values()) == {1}


async def test_a_choice_the_engine_refuses_refuses_the_answer_and_cancels_the_rest(bench, make_script, body):
    def answer(request):
        failure = Overloaded("the queue is full", 2.0) if at_of(request) == 2 else None
        return make_script(bench.rounds("Hi there", eos=False), hang=True, failure=failure)

    for stream in (True, False):
        async with bench.serve(answer) as (client, scheduler):
            response = await client.post(CHAT, json=body(n=3, stream=stream))
            await until(lambda scheduler=scheduler: sum(scheduler.cancels.values()) == 2)
        assert response.status_code == 429 and response.headers["retry-after"] == "2"


async def test_a_choice_that_fails_inside_fails_the_stream_with_one_error_event(bench, make_script, body, events):
    def answer(request):
        late = at_of(request) == 1
        failure = VerifierLost("the verifier died") if late else None
        return make_script(bench.rounds("Hi there", eos=False), hang=not late, failure=failure, late=late)

    async with bench.serve(answer) as (client, scheduler):
        found = events((await client.post(CHAT, json=body(n=2, stream=True))).text)
        await until(lambda: sum(scheduler.cancels.values()) == 1)
    assert [item for item in found if "error" in item] == [found[-1]] and "[DONE]" not in found


async def test_one_token_answers_end_although_the_first_ends_before_the_others_begin(bench, make_script, body):
    script = make_script([bench.ids("Hi")[:1]], FinishReason.LENGTH)
    async with bench.serve(script) as (client, scheduler):
        answer = (await client.post(CHAT, json=body(n=3, max_tokens=1))).json()
    assert len(scheduler.requests) == 3 and answer["usage"]["completion_tokens"] == 3
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


async def test_a_deadline_counts_from_the_first_submit(bench, make_script, body, monkeypatch):
    script = make_script(bench.rounds("Hello there"), step_s=0.05)
    async with bench.serve(script) as (client, scheduler):
        virtual_time(monkeypatch)
        await client.post(CHAT, json=body(n=2, timeout=5))
    first, second = (request.timeout_s for request in scheduler.requests)
    assert 4.99 < first <= 5 and first - 0.06 < second < first - 0.04
