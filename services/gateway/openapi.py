"""What /openapi.json says of each path: its body, its answers and its errors.

Bodies are read by hand (limits, one line that names the field), so their schemas are put in by hand too.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.gateway import response_models as bodies
from services.gateway.chat_request import ChatRequest
from services.gateway.completion_request import CompletionRequest
from services.gateway.tokens import DetokenizeRequest, TokenizeRequest

_SCHEMAS = "#/components/schemas/"
_REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ERRORS = {
    400: "A parameter is wrong, unsupported or does not fit the context; `param` names it.",
    401: "The server has API keys and none of them came in `authorization: Bearer KEY`; see `www-authenticate`.",
    403: "The API key is disabled or not for this.",
    404: "There is no such model.",
    405: "There is no such method here; the header `allow` lists those that are.",
    408: "The body did not arrive within gateway.stalled_s.",
    413: "The body is larger than gateway.max_body_bytes.",
    429: "The queue is full, the request waited too long, or the key has reached its limits (`x-ratelimit-*`); "
    "`retry-after` says when to try again.",
    500: "A fault of the server. `x-should-retry: false` when generation had begun.",
    503: "The engine starts, restarts or drains; `retry-after` says when to try again.",
    504: "The request's time ran out (`timeout`).",
}
_GENERATES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
_READS = (400, 401, 403, 404, 408, 413, 429, 500, 503)

Docs = dict[str, Any]


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + model.__name__}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": bodies.ErrorBody, "description": _ERRORS[status]} for status in statuses}


def _body(model: type[BaseModel], example: dict[str, Any]) -> Docs:
    content = {"application/json": {"schema": _ref(model), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _generating(
    request: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel], example: dict[str, Any]
) -> Docs:
    stream = {"text/event-stream": {"schema": {"type": "string", "description": f"Events of {chunk.__name__}."}}}
    good = {"model": answer, "description": "The answer, or with `stream: true` its events.", "content": stream}
    speculation = {
        "name": "x-speculation",
        "in": "header",
        "required": False,
        "description": "As `speculation` in the body, which wins: `off`, `fixed:3`, `auto; max_draft_tokens=2`.",
        "schema": {"type": "string"},
        "example": "off",
    }
    extra = _body(request, example) | {"parameters": [speculation]}
    return {"responses": {200: good, **_errors(*_GENERATES)}, "openapi_extra": extra}


def _reading(answer: type[BaseModel], *statuses: int, extra: Docs | None = None) -> Docs:
    return {"responses": {200: {"model": answer}, **_errors(*statuses)}, "openapi_extra": extra}


CHAT = _generating(
    ChatRequest,
    bodies.ChatCompletion,
    bodies.ChatCompletionChunk,
    {"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
)
COMPLETION = _generating(
    CompletionRequest, bodies.Completion, bodies.Completion, {"model": "MODEL", "prompt": "Once", "max_tokens": 32}
)
TOKENIZE = _reading(bodies.Tokens, *_READS, extra=_body(TokenizeRequest, {"prompt": "Hello"}))
DETOKENIZE = _reading(bodies.DetokenizedText, *_READS, extra=_body(DetokenizeRequest, {"tokens": [1, 2]}))
MODELS = _reading(bodies.ModelList, 401, 403, 500, 503)
MODEL = _reading(bodies.ServedModel, 401, 403, 404, 500, 503)
HEALTH = _reading(bodies.Alive, 500)
READY: Docs = {"responses": {200: {"model": bodies.Ready}, 503: {"model": bodies.NotReady}, **_errors(500)}}
METRICS: Docs = {
    "responses": {
        200: {"description": "The page.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **_errors(401, 403, 500),
    },
}


def document(app: FastAPI, version: str, model_name: str) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=version, description=app.description, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    written_by_hand: tuple[type[BaseModel], ...] = (*_REQUESTS, bodies.ChatCompletionChunk)
    for model in written_by_hand:
        schema = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path in found["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            _name_model(operation, model_name)
            if "401" in operation["responses"]:
                # The empty alternative: a server without keys asks for none.
                operation["security"] = [{"bearer": []}, {}]
            for response in operation["responses"].values():
                response.setdefault("headers", {})["x-request-id"] = {"schema": {"type": "string"}}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return found


def _name_model(operation: dict[str, Any], model_name: str) -> None:
    """Examples that work as they stand."""
    for parameter in operation.get("parameters", ()):
        if parameter["name"] == "name":
            parameter["example"] = model_name
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None and "model" in content["example"]:
        content["example"] = {**content["example"], "model": model_name}
