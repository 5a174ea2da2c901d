"""Who may ask: API keys as Bearer tokens, and which paths need one.

Keys are kept as SHA-256 digests and compared in constant time, all of them each time. Deny by default: a path that is not
listed as open needs a key as soon as there are any. Reads no files and no environment (api_keys.py does).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.errors import Forbidden, Unauthorized, answer_to, error_response
from services.gateway.exchange import Exchange
from services.gateway.limits import UNLIMITED, Limits
from services.metrics import GatewayMetrics

KeyScope = Literal["api", "metrics"]

# Alive, ready and the documentation say nothing that is not public.
OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})
METRICS_PATH = "/metrics"
_REALM = 'Bearer realm="dspark"'


@dataclass(frozen=True, slots=True)
class ApiKey:
    """name: for logs and limits. digest: SHA-256 of the key. scopes: `api` and `metrics`. limits: its own."""

    name: str
    digest: bytes
    scopes: frozenset[KeyScope] = frozenset({"api"})
    enabled: bool = True
    limits: Limits = UNLIMITED


ANONYMOUS = ApiKey("", b"")


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """No keys: everything is open. metrics_need_key: /metrics needs a key of the scope `metrics`."""

    keys: tuple[ApiKey, ...] = ()
    metrics_need_key: bool = False

    def find(self, secret: str) -> ApiKey | None:
        """The key that `secret` is; takes as long whichever it is, or none."""
        digest, found = digest_of(secret), None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def needs(self, path: str) -> KeyScope | None:
        """The scope that a path asks for; None is open."""
        if not self.keys or path in OPEN_PATHS:
            return None
        if path == METRICS_PATH:
            return "metrics" if self.metrics_need_key else None
        return "api"


NO_KEYS = AuthConfig()


class Authentication:
    """Lets a request through with its key beside it (`key_of`), or answers 401 or 403."""

    def __init__(self, app: ASGIApp, config: AuthConfig, metrics: GatewayMetrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and (wanted := self._config.needs(scope["path"])) is not None:
            try:
                key = self._allowed(Headers(scope=scope).getlist("authorization"), wanted)
            except Unauthorized as error:
                exchange, code = Exchange.of(scope), answer_to(error).code
                exchange.outcome, exchange.error = self._metrics.failed("rejected", code), code
                response = error_response(error)
                response.headers["www-authenticate"] = error.challenge
                await response(scope, receive, send)
                return
            Exchange.of(scope).api_key = key.name
            scope["state"]["key"] = key
        await self._app(scope, receive, send)

    def _allowed(self, headers: list[str], wanted: KeyScope) -> ApiKey:
        scheme, _, secret = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("an API key is needed: send the header 'Authorization: Bearer KEY'", _REALM)
        key = self._config.find(secret.strip())
        if key is None:
            raise Unauthorized("the API key is not valid", f'{_REALM}, error="invalid_token"')
        if not key.enabled:
            raise Forbidden(f"the API key {key.name!r} is disabled", f'{_REALM}, error="invalid_token"')
        if wanted not in key.scopes:
            message = f"the API key {key.name!r} is not for this: it lacks the scope {wanted!r}"
            raise Forbidden(message, f'{_REALM}, error="insufficient_scope", scope="{wanted}"')
        return key


def key_of(scope: Scope) -> ApiKey:
    """The key a request came with; `ANONYMOUS` where none is needed."""
    found = scope.get("state", {}).get("key")
    return found if isinstance(found, ApiKey) else ANONYMOUS
