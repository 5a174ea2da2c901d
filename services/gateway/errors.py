"""One table: which HTTP answer each error is, in the OpenAI envelope. Every path of the gateway ends here."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from scheduler.errors import (
    BadParams,
    Cancelled,
    DeadlineExceeded,
    DrafterLost,
    Failed,
    InternalFault,
    Overloaded,
    Rejected,
    SchedulerLost,
    ServingError,
    ShuttingDown,
    TooLong,
    VerifierLost,
)

INVALID, OVERLOADED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


class BodyTooLarge(Rejected):
    pass


class BodyTooSlow(Rejected):
    """The rest of the body would be taken for the next request, so the connection ends."""


class ModelNotFound(BadParams):
    pass


class Unauthorized(Rejected):
    """`challenge`: the WWW-Authenticate header."""

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(message)
        self.challenge = challenge


class Forbidden(Unauthorized):
    """The key is known and not for this."""


class RateLimited(Overloaded):
    """The key's own limit, not the engine's."""


class ContextTooLong(TooLong):
    """`param` names the field to change: the one that holds the prompt, or that asks for too long an answer."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """retry_after_s: sent as Retry-After when the error brings no better value; 0 sends none."""

    status: int
    type: str
    code: str
    retry_after_s: float = 0.0


TABLE: dict[type[ServingError], HttpAnswer] = {
    ServingError: HttpAnswer(500, SERVER, "internal_error"),
    Rejected: HttpAnswer(400, INVALID, "invalid_request"),
    BadParams: HttpAnswer(400, INVALID, "invalid_value"),
    BodyTooLarge: HttpAnswer(413, INVALID, "request_too_large"),
    BodyTooSlow: HttpAnswer(408, INVALID, "request_timeout"),
    ModelNotFound: HttpAnswer(404, INVALID, "model_not_found"),
    Unauthorized: HttpAnswer(401, INVALID, "invalid_api_key"),
    Forbidden: HttpAnswer(403, INVALID, "permission_denied"),
    TooLong: HttpAnswer(400, INVALID, "context_length_exceeded"),
    ContextTooLong: HttpAnswer(400, INVALID, "context_length_exceeded"),
    Overloaded: HttpAnswer(429, OVERLOADED, "engine_overloaded", 1.0),
    RateLimited: HttpAnswer(429, OVERLOADED, "rate_limit_exceeded", 1.0),
    Failed: HttpAnswer(500, SERVER, "internal_error"),
    VerifierLost: HttpAnswer(503, SERVER, "engine_unavailable", 5.0),
    DrafterLost: HttpAnswer(503, SERVER, "engine_unavailable", 5.0),
    SchedulerLost: HttpAnswer(503, SERVER, "engine_unavailable", 5.0),
    DeadlineExceeded: HttpAnswer(504, SERVER, "deadline_exceeded"),
    ShuttingDown: HttpAnswer(503, SERVER, "shutting_down", 5.0),
    InternalFault: HttpAnswer(500, SERVER, "internal_error"),
    Cancelled: HttpAnswer(499, INVALID, "client_closed_request"),
}


def answer_to(error: ServingError) -> HttpAnswer:
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def outcome_of(error: ServingError) -> str:
    """The word the request metrics use: rejected (the client's), cancelled, or failed (ours)."""
    if isinstance(error, Cancelled):
        return "cancelled"
    return "rejected" if answer_to(error).status < 500 else "failed"


def envelope(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: ServingError) -> dict[str, Any]:
    answer = answer_to(error)
    return envelope(str(error), answer.type, answer.code, getattr(error, "param", None))


def error_response(error: ServingError, *, started: bool = False) -> Response:
    """`started`: generation had begun, so a client that tries again by itself would have the work done twice."""
    answer = answer_to(error)
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", answer.retry_after_s)
    if retry_after_s:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"
    if started and answer.status >= 500:
        headers["x-should-retry"] = "false"
    return envelope_response(answer.status, error_body(error), headers)


def plain_error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    """Errors of the HTTP layer itself: unknown route, wrong method, body too large."""
    kind = INVALID if status < 500 else SERVER
    return envelope_response(status, envelope(message, kind, code), headers)


def envelope_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")
