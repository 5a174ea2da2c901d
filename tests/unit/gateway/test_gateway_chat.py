"""Chat completions over HTTP: wire order, schemas, usage, stop strings, sampling values, the official client."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import openai
import pytest

from scheduler.wire import FinishReason
from services.gateway.config import GatewayConfig
from tests.openai_schemas import check_answer, check_chunk
from tests.virtual_time import virtual_time

TEXT = "Hello there, naïve café 😀 done."


async def test_unary_body_satisfies_the_openai_schema_and_carries_the_text(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds(TEXT))) as (client, scheduler):
        response = await client.post("/v1/chat/completions", json=body())
    answer = response.json()
    check_answer(answer)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    num_prompt, num_answer = len(scheduler.requests[0].prompt_ids), len(bench.ids(TEXT)) + 1
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == num_answer
    assert answer["usage"]["total_tokens"] == num_prompt + num_answer
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert response.headers["x-request-id"]


async def test_stream_order_is_role_contents_finish_usage_done(bench, make_script, body, events):
    rounds = bench.rounds(TEXT)
    async with bench.serve(make_script(rounds, step_s=0.002)) as (client, _):
        request = body(stream=True, stream_options={"include_usage": True})
        response = await client.post("/v1/chat/completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        check_chunk(chunk)
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    first, *contents, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in contents) == TEXT
    assert all(c["choices"][0]["finish_reason"] is None and c["usage"] is None for c in contents)
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(bench.ids(TEXT)) + 1


async def test_a_verify_round_is_one_chunk(bench, make_script, body, events):
    rounds = bench.rounds("The quick brown fox jumps over the lazy dog.", width=4)
    async with bench.serve(make_script(rounds, step_s=0.002)) as (client, _):
        response = await client.post("/v1/chat/completions", json=body(stream=True))
    contents = [c for c in events(response.text)[:-1] if c["choices"][0]["delta"].get("content")]
    assert len(contents) == len([ids for ids in rounds if ids != [bench.eos]])
    assert all("usage" not in chunk for chunk in contents)


async def test_stream_and_unary_answers_have_the_same_text(bench, make_script, body, events):
    for width in range(1, 8):
        async with bench.serve(make_script(bench.rounds(TEXT * 2, width))) as (client, _):
            unary = (await client.post("/v1/chat/completions", json=body())).json()
            streamed = await client.post("/v1/chat/completions", json=body(stream=True))
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in events(streamed.text)[:-1])
        assert text == unary["choices"][0]["message"]["content"] == TEXT * 2


@pytest.mark.parametrize("stop", ["café", "fé 😀", "there, naïve", [" nothing", "don", "😀 d"]])
@pytest.mark.parametrize("width", [1, 3, 7])
async def test_stop_string_cuts_the_text_stops_the_engine_and_later_tokens_are_not_charged(
    bench, make_script, body, events, stop, width, monkeypatch
):
    script = make_script(bench.rounds(TEXT + " And much more text follows here.", width), step_s=0.002)
    async with bench.serve(script) as (client, scheduler):
        virtual_time(monkeypatch)
        unary = (await client.post("/v1/chat/completions", json=body(stop=stop))).json()
        request = body(stop=stop, stream=True, stream_options={"include_usage": True})
        streamed = await client.post("/v1/chat/completions", json=request)
        await asyncio.sleep(0.05)
    stops = [stop] if isinstance(stop, str) else stop
    ends = min((TEXT.index(s) + len(s), TEXT.index(s)) for s in stops if s in TEXT)
    expected = TEXT[: ends[1]]
    assert unary["choices"][0]["message"]["content"] == expected
    assert unary["choices"][0]["finish_reason"] == "stop"
    chunks = events(streamed.text)[:-1]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == expected
    ids = bench.ids(TEXT)
    needed = next(n for n in range(1, len(ids) + 1) if len(bench.tokenizer.decode(ids[:n]).rstrip("\ufffd")) >= ends[0])
    assert unary["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == needed
    assert sorted(scheduler.cancels.values()) == [1, 1]


async def test_length_and_stop_id_endings_are_told_apart(bench, make_script, body):
    rounds = bench.rounds("Hello there", eos=False)
    async with bench.serve(make_script(rounds, FinishReason.LENGTH)) as (client, _):
        answer = (await client.post("/v1/chat/completions", json=body())).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "Hello there"


async def test_a_stop_id_that_is_an_ordinary_token_is_counted_and_not_shown(bench, make_script, body):
    ids = bench.ids("Hello there")
    script = make_script([ids[:1], ids[1:]])
    async with bench.serve(script) as (client, scheduler):
        answer = (await client.post("/v1/chat/completions", json=body(stop_token_ids=[ids[-1]]))).json()
    assert scheduler.requests[0].params.stop_ids == (bench.eos, ids[-1])
    assert answer["choices"][0]["message"]["content"] == bench.tokenizer.decode(ids[:-1])
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_sampling_values_reach_the_engine(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": -5, "min_tokens": 2}
        request = body(**wanted, max_tokens=99, max_completion_tokens=11, ignore_eos=True, stop_token_ids=[7])
        await client.post("/v1/chat/completions", json=request)
    params = scheduler.requests[0].params
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert params.max_tokens == 11 and params.stop_ids == (7,)


async def test_defaults_fill_the_context_and_come_from_the_model(bench, make_script, body):
    bench.card = type(bench.card)(
        **{name: getattr(bench.card, name) for name in bench.card.__slots__}
        | {"defaults": {"temperature": 0.6, "top_k": 20.0}}
    )
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post("/v1/chat/completions", json=body())
        await client.post("/v1/chat/completions", json=body(temperature=0))
    first, second = (request.params for request in scheduler.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert second.temperature == 0 and second.greedy
    assert first.max_tokens == 256 - len(scheduler.requests[0].prompt_ids)


async def test_the_prompt_is_what_the_chat_template_says(bench, make_script, body):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post("/v1/chat/completions", json=body(messages=messages))
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert list(scheduler.requests[0].prompt_ids) == bench.ids(text)


async def test_speculation_numbers_hold_together(bench, make_script, body, events):
    rounds = bench.rounds("The quick brown fox jumps over the lazy dog.", width=4)
    config = GatewayConfig(speculation_metrics="detailed")
    async with bench.serve(make_script(rounds), config) as (client, _):
        unary = (await client.post("/v1/chat/completions", json=body())).json()
        request = body(stream=True, stream_options={"include_usage": True})
        streamed = events((await client.post("/v1/chat/completions", json=request)).text)
    numbers = unary["metrics"]["speculative_decoding"]
    assert streamed[-2]["metrics"]["speculative_decoding"] == numbers
    histogram = numbers["acceptance_histogram"]
    assert len(histogram) == numbers["num_spec_tokens"] + 1 == 8
    assert sum(histogram) == numbers["num_spec_steps"] == len(rounds) - 1
    accepted = sum(j * n for j, n in enumerate(histogram))
    assert accepted == numbers["num_accepted_draft_tokens"] == sum(numbers["per_step_accepted"])
    assert numbers["mean_acceptance_length"] == 1 + accepted / numbers["num_spec_steps"]
    assert sum(numbers["per_step_drafted"]) == numbers["num_draft_tokens"] == 5 * numbers["num_spec_steps"]


async def test_speculation_numbers_can_be_left_out(bench, make_script, body):
    config = GatewayConfig(speculation_metrics="off")
    async with bench.serve(make_script(bench.rounds("Hi")), config) as (client, _):
        assert "metrics" not in (await client.post("/v1/chat/completions", json=body())).json()


async def test_a_silent_stream_gets_keep_alive_comments(bench, make_script, body, events, monkeypatch):
    config = GatewayConfig(keepalive_s=0.03)
    async with bench.serve(make_script(bench.rounds("Hi"), step_s=0.1), config) as (client, _):
        virtual_time(monkeypatch)
        response = await client.post("/v1/chat/completions", json=body(stream=True))
    assert ": keep-alive\n\n" in response.text
    assert events(response.text)[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events(response.text)[-1] == "[DONE]"


async def test_line_separators_in_the_text_do_not_break_careless_readers(bench, make_script, body):
    text = "a\u2028b\u2029c\x85d\r\ne"
    async with bench.serve(make_script(bench.rounds(text))) as (client, _):
        response = await client.post("/v1/chat/completions", json=body(stream=True))
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    contents = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in lines]
    assert "".join(contents) == text


async def test_many_requests_at_once_each_get_their_own_text(bench, make_script, body):
    def answer(request):
        number = bench.tokenizer.decode(list(request.prompt_ids)).split("number ")[1].split()[0]
        return make_script(bench.rounds(f"answer {number} " * 3), step_s=0.001)

    async with bench.serve(answer) as (client, scheduler):

        async def ask(number: int) -> str:
            request = body(messages=[{"role": "user", "content": f"number {number} please"}])
            answer = (await client.post("/v1/chat/completions", json=request)).json()
            return answer["choices"][0]["message"]["content"]

        texts = await asyncio.gather(*(ask(number) for number in range(40)))
    assert texts == [f"answer {number} " * 3 for number in range(40)]
    assert scheduler.num_subscriptions == 1 and not scheduler.cancels


async def test_the_api_document_resolves_its_own_references(bench, make_script):
    async with bench.serve(make_script()) as (client, _):
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert "ChatRequest" in references and references <= set(schemas)
    assert "temperature" in schemas["ChatRequest"]["properties"]


async def test_the_openai_client_reads_both_kinds(bench, make_script):
    from services.gateway.app import create_app

    scheduler = bench.scheduler(make_script(bench.rounds(TEXT)))
    app = create_app(scheduler, bench.config)
    async with app.router.lifespan_context(app), _official_client(app) as client:
        await app.state.gateway.loaded.wait()
        messages = [{"role": "user", "content": "Hello"}]
        answer = await client.chat.completions.create(model="tiny-chat", messages=messages)
        assert answer.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(
            model="tiny-chat", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        assert [model.id async for model in client.models.list()] == ["tiny-chat"]
        assert (await client.models.retrieve("tiny-chat")).id == "tiny-chat"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=messages)
        assert missing.value.code == "model_not_found" and missing.value.param == "model"


def _official_client(app) -> openai.AsyncOpenAI:
    try:
        import httpx2 as http
    except ImportError:
        http = httpx
    transport = http.ASGITransport(app)
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", max_retries=0, http_client=http.AsyncClient(transport=transport)
    )
