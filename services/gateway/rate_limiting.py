"""The limits of a key, applied to requests: 429 with when to try again, and what is left on every answer."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.auth import ANONYMOUS, key_of
from services.gateway.errors import RateLimited, error_response
from services.gateway.exchange import Exchange
from services.gateway.limits import Limiter, Limits, Refusal
from services.metrics import GatewayMetrics


class RateLimiting:
    """Counts what asks the server to work, which is every POST. `anonymous`: the limits of all requests without a key
    together."""

    def __init__(self, app: ASGIApp, anonymous: Limits, metrics: GatewayMetrics) -> None:
        self._app, self._anonymous, self._metrics = app, anonymous, metrics
        self.limiter = Limiter(time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        key = key_of(scope)
        limits = self._anonymous if key is ANONYMOUS else key.limits
        standing = self.limiter.take(key.name, limits)
        if isinstance(standing, Refusal):
            return await self._refuse(standing, key.name, scope, receive, send)
        headers = standing.headers()

        async def send_with_standing(message: Message) -> None:
            if message["type"] == "http.response.start" and headers:
                MutableHeaders(scope=message).update(headers)
            await send(message)

        try:
            await self._app(scope, receive, send_with_standing)
        finally:
            self.limiter.give_back(key.name)
        return None

    async def _refuse(self, refusal: Refusal, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        who = f"the API key {name!r}" if name else "this server"
        error = RateLimited(f"{who} has {refusal.reason}; try again later", refusal.retry_after_s)
        exchange, code = Exchange.of(scope), "rate_limit_exceeded"
        exchange.outcome, exchange.error = self._metrics.failed("rejected", code), code
        response = error_response(error)
        response.headers.update(refusal.standing.headers())
        await response(scope, receive, send)
