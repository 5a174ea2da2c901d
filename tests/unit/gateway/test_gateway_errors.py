"""Every path that can fail answers in the OpenAI envelope, with the right status, and says whether to try again."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

import scheduler.errors
from scheduler.errors import (
    DeadlineExceeded,
    InternalFault,
    Overloaded,
    ServingError,
    ShuttingDown,
    TooLong,
    VerifierLost,
)
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.errors import TABLE, answer_to, error_response
from services.gateway.refusals import CHAT_UNSUPPORTED
from tests.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What is no list of earlier tool calls.
NO_CALLS = [
    "f",
    {"f": 1},
    [1],
    [{"id": "c"}],
    [{"function": {"name": 5}}],
    [{"function": {"name": "f", "arguments": 7}}],
]


def all_kinds(root: type[ServingError] = ServingError) -> set[type[ServingError]]:
    return {root}.union(*(all_kinds(child) for child in root.__subclasses__()))


def check_envelope(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"] and body["error"]["code"]
    return body["error"]


def test_every_error_of_the_tree_has_its_own_line_in_the_table():
    ours = {kind for kind in all_kinds() if kind.__module__.startswith(("scheduler.", "services."))}
    assert ours == set(TABLE)
    assert {kind for kind in vars(scheduler.errors).values() if isinstance(kind, type)} >= {TooLong, Overloaded}


def test_an_error_made_later_is_answered_as_its_parent():
    class Fresh(VerifierLost):
        pass

    assert answer_to(Fresh("x")) == TABLE[VerifierLost]


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("the queue is full", retry_after_s=2.3), 429, "3"),
        (TooLong("too long"), 400, None),
        (VerifierLost("gone"), 503, "5"),
        (ShuttingDown("draining"), 503, "5"),
        (DeadlineExceeded("too late"), 504, None),
        (InternalFault("bug"), 500, None),
    ],
)
async def test_what_the_engine_raises_at_submit_keeps_its_status(bench, make_script, body, error, status, retry_after):
    for stream in (False, True):
        async with bench.serve(make_script(failure=error)) as (client, scheduler):
            response = await client.post(CHAT, json=body(stream=stream))
        found = check_envelope(response, status)
        assert found["message"] == str(error)
        assert found["param"] == ("messages" if isinstance(error, TooLong) else None)
        assert response.headers.get("retry-after") == retry_after
        assert "x-should-retry" not in response.headers
        assert not scheduler.cancels


def test_only_failures_after_generation_began_forbid_a_retry():
    assert error_response(InternalFault("x"), started=True).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(InternalFault("x")).headers
    assert "x-should-retry" not in error_response(TooLong("x"), started=True).headers


async def test_a_failure_inside_a_unary_answer_is_a_500_that_forbids_a_retry(bench, make_script, body):
    script = make_script(bench.rounds("Hello there"), failure=InternalFault("bug"), late=True)
    async with bench.serve(script) as (client, _):
        response = await client.post(CHAT, json=body())
    check_envelope(response, 500)
    assert response.headers["x-should-retry"] == "false"


async def test_a_failure_inside_a_stream_is_an_error_event_without_done(bench, make_script, body, events):
    script = make_script(bench.rounds("Hello there", eos=False), failure=VerifierLost("the verifier died"), late=True)
    async with bench.serve(script) as (client, _):
        response = await client.post(CHAT, json=body(stream=True))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello there"
    assert last["error"]["message"] == "the verifier died" and last["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in response.text and all(c["choices"][0]["finish_reason"] is None for c in chunks)


async def test_a_failure_before_the_first_token_of_a_stream_has_its_own_status(bench, make_script, body):
    async with bench.serve(make_script(failure=DeadlineExceeded("too late"), late=True)) as (client, _):
        response = await client.post(CHAT, json=body(stream=True))
    check_envelope(response, 504)
    assert "x-should-retry" not in response.headers


async def test_requests_of_a_scheduler_that_dies_end_with_503(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi", eos=False), hang=True)) as (client, scheduler):
        waiting = [asyncio.create_task(client.post(CHAT, json=body())) for _ in range(5)]
        await until(lambda: len(scheduler.requests) == 5)
        scheduler.die()
        for response in await asyncio.gather(*waiting):
            check_envelope(response, 503)
        scheduler.answer = lambda request: make_script(bench.rounds("back"))
        again = await client.post(CHAT, json=body())
    assert again.json()["choices"][0]["message"]["content"] == "back"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"[1]", "object"),
        (b"\xff\xfe", "JSON"),
        (b'{"model": NaN}', "model"),
        (b"[" * 100_000, "JSON"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(bench, make_script, content, word):
    async with bench.serve(make_script()) as (client, _):
        error = check_envelope(await client.post(CHAT, content=content), 400)
    assert word in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**4299}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        *(({"messages": [{"role": "assistant", "tool_calls": calls}]}, "messages.0") for calls in NO_CALLS),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
async def test_a_wrong_parameter_is_a_400_that_names_it(bench, make_script, body, change, param):
    async with bench.serve(make_script()) as (client, scheduler):
        error = check_envelope(await client.post(CHAT, json=body(**change)), 400)
    assert error["param"] == param and not scheduler.requests


@pytest.mark.parametrize("name", sorted(CHAT_UNSUPPORTED))
async def test_an_unsupported_parameter_is_refused_by_name_unless_it_asks_for_nothing(bench, make_script, body, name):
    asking = {"tool_choice": "required", "function_call": {"name": "f"}, "verbosity": "high"}
    value = asking.get(name, {"type": "json_object"} if name == "response_format" else "something")
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        error = check_envelope(await client.post(CHAT, json=body(**{name: value})), 400)
        assert error["param"] == name and name in error["message"]
        for harmless in (None, *CHAT_UNSUPPORTED[name]):
            assert (await client.post(CHAT, json=body(**{name: harmless}))).status_code == 200


async def test_parameters_that_change_nothing_and_unknown_ones_are_accepted(bench, make_script, body):
    extra = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "from_the_future": {"x": [1]},
    }
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        response = await client.post(CHAT, json=body(**extra))
    assert response.status_code == 200


async def test_a_context_that_is_too_small_is_a_400_with_both_numbers(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        long = check_envelope(
            await client.post(CHAT, json=body(messages=[{"role": "user", "content": "é" * 300}])), 400
        )
        least = check_envelope(await client.post(CHAT, json=body(min_tokens=250)), 400)
    for error, param in ((long, "messages"), (least, "min_tokens")):
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "256" in error["message"]
    assert "at least 250" in least["message"] and not scheduler.requests


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")]
)
async def test_an_answer_too_long_for_the_context_is_told_what_fits(bench, make_script, body, path, field):
    """The prompt was named, which fits."""
    fields = body() if path == CHAT else {"model": body()["model"], "prompt": ["Hi", "Hi there", "Hi"]}
    fields.pop("max_tokens", None)
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        error = check_envelope(await client.post(path, json=fields | {field: 256}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        most = int(re.search(rf"; {field} can be at most (\d+)$", error["message"])[1])
        assert (await client.post(path, json=fields | {field: most + 1})).status_code == 400
        assert not scheduler.requests
        assert (await client.post(path, json=fields | {field: most})).status_code == 200


@pytest.mark.parametrize("room", [0, 7])
async def test_a_cache_too_small_for_a_request_is_of_the_field_that_can_change_it(bench, make_script, body, room):
    async with bench.serve(make_script(failure=TooLong("too long", room))) as (client, _):
        error = check_envelope(await client.post(CHAT, json=body(max_completion_tokens=9)), 400)
    assert error["param"] == ("max_completion_tokens" if room else "messages")


async def test_unknown_routes_and_wrong_methods_are_enveloped(bench, make_script):
    async with bench.serve(make_script()) as (client, _):
        for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/x", "/v1/chat/completions/", "/health/"):
            assert path in check_envelope(await client.get(path), 404)["message"]
        wrong = await client.get(CHAT)
        check_envelope(wrong, 405)
        assert wrong.headers["allow"] == "POST"
        check_envelope(await client.post("/health"), 405)
        check_envelope(await client.get("/v1/models/other"), 404)


async def test_a_body_over_the_limit_is_a_413_declared_or_not(bench, make_script, body):
    config = GatewayConfig(max_body_bytes=2000)
    big = body(messages=[{"role": "user", "content": "x" * 3000}])

    async def pieces():
        for piece in (json.dumps(big).encode()[start : start + 500] for start in range(0, 3100, 500)):
            yield piece

    async with bench.serve(make_script(), config) as (client, _):
        check_envelope(await client.post(CHAT, json=big), 413)
        check_envelope(await client.post(CHAT, content=pieces()), 413)


async def test_half_of_a_surrogate_pair_is_a_400(bench, make_script, body):
    half = body(messages=[{"role": "user", "content": "\ud83d"}])
    async with bench.serve(make_script()) as (client, _):
        error = check_envelope(await client.post(CHAT, content=json.dumps(half)), 400)
    assert error["param"] == "messages"


async def test_earlier_tool_calls_nested_too_deep_to_read_are_left_as_they_are(bench, make_script, body):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "and?"}]
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        found = check_envelope(await client.post(CHAT, json=body(messages=messages)), 400)
    assert found["code"] == "context_length_exceeded"


async def test_a_template_that_refuses_the_messages_is_a_400(bench, make_script, body):
    fields = {name: getattr(bench.card, name) for name in bench.card.__slots__}
    refusing = fields | {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    bench.card = type(bench.card)(**refusing)
    async with bench.serve(make_script()) as (client, _):
        error = check_envelope(await client.post(CHAT, json=body()), 400)
    assert "roles must alternate" in error["message"] and error["param"] == "messages"


async def test_a_bug_of_ours_is_an_enveloped_500(bench, make_script, body):
    def broken(request):
        raise RuntimeError("a bug")

    app = create_app(bench.scheduler(make_script()), bench.config)
    app.add_api_route("/broken", broken)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        check_envelope(await client.get("/broken?request=1"), 500)
    async with bench.serve(broken) as (client, _):
        error = check_envelope(await client.post(CHAT, json=body()), 500)
        assert "a bug" not in error["message"]
        assert (await client.get("/health")).status_code == 200


async def test_before_the_model_is_known_only_health_is_good(bench, make_script, body, in_virtual_time):
    scheduler = bench.scheduler(make_script(bench.rounds("Hi")))
    scheduler.ready = False
    app = create_app(scheduler, bench.config)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        await asyncio.sleep(0.02)
        assert (await client.get("/health")).status_code == 200
        waiting = await client.get("/ready")
        assert waiting.status_code == 503 and "loading the models" in waiting.json()["reason"]
        refused = await client.post(CHAT, json=body())
        check_envelope(refused, 503)
        assert refused.headers["retry-after"]
        check_envelope(await client.get("/v1/models"), 503)
        assert (await client.get("/metrics")).status_code == 200
        scheduler.ready = True
        await app.state.gateway.loaded.wait()
        assert (await client.post(CHAT, json=body())).status_code == 200
        scheduler.healthy = False
        sick = await client.get("/ready")
        assert sick.status_code == 503 and "no step" in sick.json()["reason"]
