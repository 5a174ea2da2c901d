"""The way of a request that generates, past FastAPI's routing: a router costs each of them as much as reading its body does.

The same endpoints stand in the router, for what does not match here to the letter (a root path) and for /openapi.json.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.errors import ServingError
from services.gateway.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class ShortWay:
    """endpoints: by path, for POST. The innermost layer: everything that holds for all requests lies around it."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except ServingError as error:
            response = error_response(error)
        await response(scope, receive, send)
