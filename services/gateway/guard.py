"""The outermost layer of the application: request ids in and out, whatever nobody handled becomes a 500 envelope, and
a client that takes nothing of its answer is given up."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.errors import InternalFault
from services.gateway.errors import plain_error
from services.gateway.exchange import Exchange
from services.gateway.within import within
from services.logs import about

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientStalled(OSError):
    """As good as a connection that is closed."""


class Guard:
    """A client's own x-request-id is taken over when it is 1 to 128 letters, digits or any of `._:-`; else, and without one,
    the request gets a new id. answers_id: send it back; Ray Serve does that itself. stalled_s: GatewayConfig."""

    def __init__(self, app: ASGIApp, answers_id: bool, stalled_s: float) -> None:
        self._app = app
        self._stalled_s = stalled_s
        self._answers_id = answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = _request_id(scope)
        Exchange.of(scope).request_id = request_id
        started = False

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._answers_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            try:
                await within(self._stalled_s, send(message))
            except TimeoutError:
                raise ClientStalled(f"the client took nothing of its answer for {self._stalled_s:g} s") from None

        try:
            with about(request_id):
                await self._app(scope, receive, guarded_send)
        except ClientStalled as error:
            logger.info("%s", error, extra={"request_ids": (request_id,)})
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"], extra={"request_ids": (request_id,)})
            if started:
                # the server closes the connection, and logs this: what it was may quote the request
                raise InternalFault(f"the answer to {request_id} broke off") from None
            await plain_error(500, "internal error", "internal_error")(scope, receive, guarded_send)
        return None


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _GOOD_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
