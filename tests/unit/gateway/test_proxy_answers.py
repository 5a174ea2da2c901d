"""Serve's proxy answers in the OpenAI envelope too: its own messages, as Serve makes them, come out as ours."""

from __future__ import annotations

import asyncio
import json
import pickle

import httpx
import pytest
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    convert_object_to_asgi_messages,
    get_http_response_status,
    send_http_response_on_exception,
    validate_http_proxy_callback_return,
)
from ray.serve._private.utils import call_function_from_import_path
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from services.gateway.proxy_answers import ENVIRONMENT

HEADERS = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
CHUNK = b'data: {"choices":[]}\n\n'


def head(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


NO_ROUTE = convert_object_to_asgi_messages("Path '/v1/models' not found.", 404)


async def answers(messages: list[Message], path: str = "/v1/models") -> list[Message]:
    """What a client of Serve's proxy gets when the proxy has `messages` for it."""
    return await answers_in_turn([messages], path)


async def answers_in_turn(
    exchanges: list[list[Message]], path: str = "/v1/models", *, gone: bool = False
) -> list[Message]:
    """What the last of several clients of one proxy gets, the proxy built up as Serve builds it."""
    following = iter(exchanges)

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        """Beside what comes in turn it is asked whether there is a gateway; that one answers, or there is no route."""
        for message in (NO_ROUTE if gone else ANSWERED) if scope["path"] != path else next(following):
            await send(message)

    callback = call_function_from_import_path(ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    (middleware,) = validate_http_proxy_callback_return(callback)
    app = middleware.cls(RequestIdMiddleware(proxy), *middleware.args, **middleware.kwargs)
    got: list[Message] = []

    async def send(message: Message) -> None:
        got.append(pickle.loads(pickle.dumps(message)))

    async def receive() -> Message:
        return await asyncio.Future()

    for _ in exchanges:
        got.clear()
        await app({"type": "http", "method": "GET", "path": path, "headers": [(b"x-request-id", b"r1")]}, receive, send)
    return got


def response(messages: list[Message]) -> httpx.Response:
    assert [message["type"] for message in messages] == ["http.response.start", "http.response.body"]
    return httpx.Response(messages[0]["status"], headers=messages[0]["headers"], content=messages[1]["body"])


def own(error: Exception) -> list[Message]:
    """The proxy's own answer to an error that met it while nothing was sent yet: nothing at all for most."""
    return send_http_response_on_exception(get_http_response_status(error, 1.0, "r1"), False)


@pytest.mark.parametrize(
    ("messages", "status", "code", "retry_after"),
    [
        (NO_ROUTE, 503, "engine_unavailable", "5"),
        (own(DeploymentUnavailableError("x")), 503, "engine_unavailable", "5"),
        (own(BackPressureError(num_queued_requests=1, max_queued_requests=1)), 503, "engine_unavailable", "5"),
        (own(TimeoutError()), 504, "deadline_exceeded", None),
        (own(RuntimeError("The actor died unexpectedly")), 503, "engine_unavailable", "5"),
    ],
    ids=["no route", "no deployment", "full", "timed out", "gateway died"],
)
async def test_an_error_of_the_proxy_itself_is_an_envelope(messages, status, code, retry_after):
    answer = response(await answers(messages))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers.get("retry-after") == retry_after and answer.headers["x-request-id"] == "r1"
    assert answer.headers["content-type"] == "application/json"


ANSWERED = [head(200, HEADERS), part(b"{}", False)]


async def test_no_route_after_a_gateway_has_answered_is_a_server_that_shuts_down():
    answer = response(await answers_in_turn([NO_ROUTE, ANSWERED, NO_ROUTE]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "5" and "shutting down" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "exchanges",
    [
        [NO_ROUTE, NO_ROUTE],
        [own(DeploymentUnavailableError("x")), NO_ROUTE],
        [ANSWERED, own(DeploymentUnavailableError("x"))],
        [ANSWERED, own(RuntimeError("The actor died unexpectedly"))],
    ],
    ids=["never served", "only the proxy answered", "the gateway failed", "the gateway died"],
)
async def test_what_is_no_shutdown_is_not_called_one(exchanges):
    assert response(await answers_in_turn(exchanges)).json()["error"]["code"] == "engine_unavailable"


async def test_health_is_alive_also_while_no_gateway_is_there():
    answer = response(await answers(own(DeploymentUnavailableError("x")), path="/health"))
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


async def test_a_wait_that_the_proxy_names_is_handed_on():
    messages = [head(503, [(b"content-type", b"text/plain"), (b"retry-after", b"17")]), part(b"busy", False)]
    assert response(await answers(messages)).headers["retry-after"] == "17"


async def test_a_stream_whose_gateway_dies_ends_with_an_error_event():
    *passed, last = await answers([head(200, SSE), part(CHUNK, True)])
    assert [message.get("body") for message in passed] == [None, CHUNK] and not last["more_body"]
    event = last["body"].decode()
    assert event.endswith("\n\n") and json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("cut", [[head(200, SSE), part(CHUNK, True)], []], ids=["stream", "whole answer"])
@pytest.mark.parametrize(
    ("before", "gone", "code"),
    [
        ([], False, "engine_unavailable"),
        ([], True, "engine_unavailable"),
        (["answered"], False, "engine_unavailable"),
        (["answered"], True, "shutting_down"),
    ],
)
async def test_what_is_cut_off_when_the_application_is_gone_says_that_the_server_shut_down(cut, before, gone, code):
    """A proxy that has only begun a stream has seen its gateway."""
    got = await answers_in_turn([*([ANSWERED] * len(before)), cut], gone=gone)
    if cut and gone:
        code = "shutting_down"
    assert json.loads(got[-1]["body"].decode().removeprefix("data: "))["error"]["code"] == code


@pytest.mark.parametrize(
    "messages",
    [
        [head(200, SSE), part(CHUNK, True), part(b"data: [DONE]\n\n", False)],
        [head(404, HEADERS), part(b'{"error": {}}', False)],
        [head(200, [(b"content-type", b"text/plain; version=0.0.4")]), part(b"metrics", False)],
        [head(200, HEADERS), part(b"{", True)],
    ],
    ids=["whole stream", "an error of ours", "metrics", "a cut body, which its length gives away"],
)
async def test_what_a_gateway_sends_passes_unchanged(messages):
    got = await answers(messages)
    assert [message.get("body") for message in got] == [message.get("body") for message in messages]
    assert got[0]["status"] == messages[0]["status"]


async def test_serves_own_pages_stay_as_they_are():
    got = await answers(convert_object_to_asgi_messages("This node is being drained.", 503), "/-/healthz")
    assert response(got).text == "This node is being drained."
