"""A request body from bytes to a validated model. Every complaint is a BadParams that names the first wrong field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from scheduler.errors import BadParams
from services.gateway.chat_request import ChatRequest
from services.gateway.completion_request import CompletionRequest
from services.gateway.refusals import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, refuse_unsupported

M = TypeVar("M", bound=BaseModel)


def parse_chat(body: bytes) -> ChatRequest:
    raw = parse_object(body)
    refuse_unsupported(raw, CHAT_UNSUPPORTED)
    chat = validated(ChatRequest, raw)
    chat.check_together()
    return chat


def parse_completion(body: bytes) -> CompletionRequest:
    raw = parse_object(body)
    refuse_unsupported(raw, COMPLETION_UNSUPPORTED)
    completion = validated(CompletionRequest, raw)
    completion.check_together()
    return completion


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadParams(f"the request body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadParams("the request body must be a JSON object")
    return raw


def validated(model: type[M], raw: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _bad_params(error) from None


def _bad_params(error: ValidationError) -> BadParams:
    first = error.errors(include_url=False)[0]
    location = ".".join(str(part)[:100] for part in first["loc"] if not _is_union_arm(part))
    reason = first["msg"].removeprefix("Value error, ")
    return BadParams(f"{location}: {reason}" if location else reason, param=location or None)


def _is_union_arm(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "int") or part.startswith("constrained-"))
