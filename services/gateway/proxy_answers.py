"""What Ray Serve's proxy would answer by itself, in the OpenAI envelope: while no gateway is deployed, when one dies, when
a request takes longer than its client let Serve wait.

The proxy calls `middlewares` when it starts and puts what it returns around itself, in the proxy's process: outside every
gateway. A gateway never answers an error in plain text, so one that comes by is the proxy's own. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.errors import DeadlineExceeded, SchedulerLost, ServingError, ShuttingDown
from services.gateway.errors import error_body, error_response
from services.gateway.guard import REQUEST_ID
from services.gateway.stream import event

logger = logging.getLogger(__name__)

# Set where the proxies of Serve start, so that they call `middlewares`.
ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.gateway.proxy_answers:middlewares"}

_PROXYS_OWN_PATHS = "/-/"
_HEALTH_PATH = "/health"
_NO_ROUTE = 404
_TIMED_OUT = 408
_LOOK_S = 1.0


def middlewares() -> list[Middleware]:
    return [Middleware(ProxyAnswers)]


class ProxyAnswers:
    """Around the proxy: its own errors become envelopes, a stream that it breaks off ends with an error event.

    Serve takes the route away first when an application has to go: no route after a gateway has answered is a server that
    shuts down, before that one that starts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._served = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_PROXYS_OWN_PATHS):
            return await self._app(scope, receive, send)
        passing = _Passing(send)
        try:
            await self._app(scope, receive, passing.send)
        except Exception:
            logger.exception("Serve's proxy failed")
        self._served |= passing.started and passing.refused is None
        if passing.refused is not None:
            alive = scope["path"] == _HEALTH_PATH  # whoever answers this lives, whatever has gone or is to come
            refusal = JSONResponse({"status": "alive"}) if alive else _refusal(passing.refused, served=self._served)
            await _answer(refusal, scope, receive, send)
        elif not passing.started:
            lost = SchedulerLost("the gateway stopped before it answered; send the request again")
            await _answer(error_response(await self._why(lost, scope)), scope, receive, send)
        elif passing.streams and not passing.complete:
            lost = SchedulerLost("the gateway stopped while it answered")
            cut = event(error_body(await self._why(lost, scope)))
            await send({"type": "http.response.body", "body": cut, "more_body": False})
        return None

    async def _why(self, lost: SchedulerLost, scope: Scope) -> ServingError:
        """`lost`, unless there is no route to a gateway any more: then it was cut off at the end of a drain."""
        looking = _Passing(_to_nobody)
        asked = {**scope, "method": "GET", "path": _HEALTH_PATH, "raw_path": _HEALTH_PATH.encode(), "query_string": b""}
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._app(asked, _no_body(), looking.send)
        except Exception:  # a gateway that is there and does not answer
            return lost
        if self._served and looking.refused is not None and looking.refused["status"] == _NO_ROUTE:
            return ShuttingDown("the server shut down before the request ended")
        return lost


class _Passing:
    """Messages on their way to the client. refused: the beginning of an error of the proxy's own, which was held back."""

    def __init__(self, send: Send) -> None:
        self.started = self.streams = self.complete = False
        self.refused: Message | None = None
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            if message["status"] >= 400 and content_type.startswith("text/plain"):
                self.refused = message
            self.started = True
            self.streams = content_type.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        if self.refused is None:
            await self._send(message)


async def _to_nobody(message: Message) -> None:
    pass


def _no_body() -> Receive:
    """A client that has sent its request and waits."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Future()
        sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


def _refusal(start: Message, *, served: bool) -> Response:
    error: ServingError = SchedulerLost("no gateway answers: one starts, or starts again; send the request again")
    if start["status"] == _NO_ROUTE and served:
        error = ShuttingDown("the server is shutting down; send the request to another one, or when it is back")
    elif start["status"] == _TIMED_OUT:
        error = DeadlineExceeded("the request took longer than its x-request-timeout-seconds")
    response = error_response(error)
    for name, value in Headers(raw=start["headers"]).items():
        if name in ("retry-after", REQUEST_ID):
            response.headers[name] = value
    return response


async def _answer(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if (request_id := Headers(scope=scope).get(REQUEST_ID)) is not None:
        MutableHeaders(raw=response.raw_headers)[REQUEST_ID] = request_id
    await response(scope, receive, send)
