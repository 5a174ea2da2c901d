"""What a request may say beside its text: names of the model, ids, deadlines, priorities, hints, template variables."""

from __future__ import annotations

import re

import pytest

from scheduler.errors import Overloaded
from scheduler.wire import FinishReason
from services.bench.prompts import BUILT_IN
from services.gateway.config import GatewayConfig
from services.gateway.text_class import text_class
from tests.openai_schemas import check_error, validator
from tests.virtual_time import virtual_time

CHAT = "/v1/chat/completions"


async def test_every_served_name_works_and_no_other(bench, make_script, body):
    config = GatewayConfig(served_names=("gpt-4o-mini", "tiny-chat", "org/model"))
    async with bench.serve(make_script(bench.rounds("Hi")), config) as (client, _):
        listed = (await client.get("/v1/models")).json()
        validator("ListModelsResponse").validate(listed)
        assert [model["id"] for model in listed["data"]] == ["tiny-chat", "gpt-4o-mini", "org/model"]
        for name in ("tiny-chat", "gpt-4o-mini", "org/model"):
            model = (await client.get(f"/v1/models/{name}")).json()
            validator("Model").validate(model)
            answer = (await client.post(CHAT, json=body(model=name))).json()
            assert model["id"] == answer["model"] == name
        for response in (await client.get("/v1/models/gpt-4"), await client.post(CHAT, json=body(model="gpt-4"))):
            check_error(response.json())
            error = response.json()["error"]
            assert response.status_code == 404 and (error["code"], error["param"]) == ("model_not_found", "model")
            assert "gpt-4o-mini" in error["message"]


@pytest.mark.parametrize("given", ["abc-123", "req_1.2:3", "x" * 128])
async def test_a_good_request_id_comes_back(bench, make_script, body, given):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        for response in (
            await client.post(CHAT, json=body(), headers={"X-Request-Id": given}),
            await client.post(CHAT, json=body(stream=True), headers={"X-Request-Id": given}),
            await client.get("/nothing", headers={"X-Request-Id": given}),
        ):
            assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "é", 'a"b', "a\tb"])
async def test_a_bad_request_id_is_replaced(bench, make_script, given):
    async with bench.serve(make_script()) as (client, _):
        ids = [
            (await client.get("/health", headers=[(b"x-request-id", given.encode())])).headers["x-request-id"]
            for _ in range(2)
        ]
    assert ids[0] != ids[1] and all(re.fullmatch(r"req_[0-9a-f]{32}", each) for each in ids)


async def test_every_sampling_value_reaches_the_engine(bench, make_script, body):
    wanted = {"presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.1}
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(CHAT, json=body(**wanted, logit_bias={"5": -100, "17": 2.5}))
        await client.post(CHAT, json=body())
    told, silent = (request.params for request in scheduler.requests)
    assert {name: getattr(told, name) for name in wanted} == wanted
    assert told.logit_bias == ((5, -100.0), (17, 2.5))
    assert (silent.presence_penalty, silent.frequency_penalty, silent.repetition_penalty) == (0, 0, 1)
    assert silent.logit_bias == () and silent.num_logprobs is None and silent.grammar is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": list(range(300))}, "stop_token_ids"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"priority": 101}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"text_class": "poem"}, "text_class"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"best_of": 3}, "best_of"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "messages.0.content"),
    ],
)
async def test_a_wrong_parameter_is_a_400_that_names_it(bench, make_script, body, change, param):
    async with bench.serve(make_script()) as (client, scheduler):
        response = await client.post(CHAT, json=body(**change))
    check_error(response.json())
    assert response.status_code == 400 and response.json()["error"]["param"] == param and not scheduler.requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"echo": True, "store": True}, "echo and store are not supported by this server"),
        ({"store": True, "echo": True, "audio": {}}, "store, echo and audio are not supported by this server"),
        ({"store": False, "echo": True, "modalities": ["text"]}, "echo is not supported by this server"),
    ],
)
async def test_all_unsupported_parameters_are_named_at_once(bench, make_script, body, change, message):
    async with bench.serve(make_script()) as (client, _):
        response = await client.post(CHAT, json=body(**change))
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"] == message
    assert error["param"] == next(name for name in change if message.startswith(name))


async def test_deadlines_are_capped_by_the_deployment_and_priorities_passed_on(bench, make_script, body, monkeypatch):
    config = GatewayConfig(max_timeout_s=60)
    async with bench.serve(make_script(bench.rounds("Hi")), config) as (client, scheduler):
        virtual_time(monkeypatch)
        await client.post(CHAT, json=body(timeout=1.5, priority=-3))
        await client.post(CHAT, json=body(timeout=10**6, priority=100))
        await client.post(CHAT, json=body())
    found = [(request.timeout_s, request.priority) for request in scheduler.requests]
    assert [priority for _, priority in found] == [-3, 100, 0]
    assert found[0][0] == pytest.approx(1.5, abs=0.1) and found[1][0] == pytest.approx(60, abs=0.1)
    assert found[2][0] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waited_too_long_for_a_place_is_a_429(bench, make_script, body, stream):
    script = make_script(failure=Overloaded("the request waited 3 s for a place, with 4 before it"), late=True)
    async with bench.serve(script) as (client, _):
        response = await client.post(CHAT, json=body(stream=stream))
    check_error(response.json())
    assert response.status_code == 429 and response.headers["retry-after"] == "1" and "4 before it" in response.text


async def test_a_stream_that_waits_says_its_place_in_the_queue_until_it_has_one(
    bench, make_script, body, events, monkeypatch
):
    config = GatewayConfig(keepalive_s=0.03)
    async with bench.serve(make_script(bench.rounds("Hi"), step_s=0.1), config) as (client, scheduler):
        virtual_time(monkeypatch)
        scheduler.places["chatcmpl"] = 3
        response = await client.post(CHAT, json=body(stream=True))
    comments = [part for part in response.text.split("\n\n") if part.startswith(":")]
    assert comments[0] == ": keep-alive, place 3 in the queue" and comments[-1] == ": keep-alive"
    assert events(response.text)[-1] == "[DONE]"


@pytest.mark.parametrize("kind", list(BUILT_IN))
def test_most_prompts_of_a_kind_are_recognised(kind):
    classes = [text_class(prompt) for prompt in BUILT_IN[kind]]
    assert classes.count(kind) >= 7 and text_class("  ") == ""


def test_a_hint_costs_next_to_nothing_on_a_long_prompt():
    import timeit

    text = "lorem ipsum " * 100_000 + "def f(x):\n    return x[0] + 1;\n" * 20
    assert text_class(text) == "code"
    assert timeit.timeit(lambda: text_class(text), number=20) / 20 < 0.01


async def test_the_hint_comes_from_the_last_message_or_from_the_client(bench, make_script, body):
    code = [{"role": "user", "content": "hi"}, {"role": "user", "content": "def f(a, b):\n    return a[b] == {}"}]
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(CHAT, json=body(messages=code))
        await client.post(CHAT, json=body(messages=code, text_class="math"))
        await client.post("/v1/completions", json={"model": "tiny-chat", "prompt": "Solve 3x + 7 = 25 for x."})
        await client.post("/v1/completions", json={"model": "tiny-chat", "prompt": [5, 6]})
    assert [request.text_class for request in scheduler.requests] == ["code", "math", "math", ""]


async def test_template_variables_reach_the_template(bench, make_script, body):
    fields = {name: getattr(bench.card, name) for name in bench.card.__slots__}
    template = "{% if enable_thinking is false %}quiet {% endif %}{{ messages[0].content }}{{ eos_token }}"
    bench.card = type(bench.card)(**fields | {"chat_template": template})
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(CHAT, json=body(chat_template_kwargs={"enable_thinking": False}))
        await client.post(CHAT, json=body())
        refused = await client.post(CHAT, json=body(chat_template_kwargs={"self": 1}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs.self"
    texts = [bench.tokenizer.decode(list(r.prompt_ids), skip_special_tokens=False) for r in scheduler.requests]
    assert texts == ["quiet Hello<|im_end|>", "Hello<|im_end|>"]


async def test_a_conversation_with_tools_names_and_parts_is_rendered_whole(bench, make_script, body):
    fields = {name: getattr(bench.card, name) for name in bench.card.__slots__}
    template = (
        "{% for m in messages %}{{ m.role }}({{ m.name or '' }}){{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
        "{{ m.tool_call_id or '' }};{% endfor %}"
    )
    bench.card = type(bench.card)(**fields | {"chat_template": template})
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(CHAT, json=body(messages=messages))
    text = bench.tokenizer.decode(list(scheduler.requests[0].prompt_ids))
    assert text == "system()brief;user(ann)a\nb;assistant()<weather Oslo>;tool()rainc1;assistant()no;"


async def test_stop_strings_are_not_looked_for_before_min_tokens(bench, make_script, body):
    text = "one two one two one"
    ids = bench.ids(text)
    async with bench.serve(make_script([[each] for each in ids], FinishReason.LENGTH)) as (client, _):
        count = len(bench.ids("one two "))
        answer = (await client.post(CHAT, json=body(stop="one", min_tokens=count))).json()
        assert answer["choices"][0]["message"]["content"] == "one two "
        assert answer["usage"]["completion_tokens"] > count
        early = (await client.post(CHAT, json=body(stop="one"))).json()
    assert early["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("width", [1, 7])
async def test_a_stop_string_that_ends_after_min_tokens_ends_the_answer(bench, make_script, body, width):
    """Also where it begins before: its beginning is held back."""
    ids = bench.ids("one two one two one")
    rounds = [ids[start : start + width] for start in range(0, len(ids), width)]
    async with bench.serve(make_script(rounds, FinishReason.LENGTH)) as (client, _):
        answer = (await client.post(CHAT, json=body(stop="one t", min_tokens=1))).json()
    assert answer["choices"][0]["message"]["content"] == "" and answer["choices"][0]["finish_reason"] == "stop"
    assert 1 < answer["usage"]["completion_tokens"] < len(ids)


async def test_the_documentation_page_needs_nothing_from_elsewhere(bench, make_script):
    async with bench.serve(make_script()) as (client, _):
        page = await client.get("/docs")
        document = (await client.get("/openapi.json")).json()
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"?https?:", page.text)
    for path in document["paths"]:
        assert path in page.text
    for name in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page.text


async def test_the_document_names_every_error_and_both_kinds_of_answer(bench, make_script):
    async with bench.serve(make_script()) as (client, _):
        document = (await client.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = document["paths"][path]["post"]
        assert set(operation["responses"]) >= {"200", "400", "404", "413", "429", "500", "503", "504"}
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert "422" not in str(document["paths"])
