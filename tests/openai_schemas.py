"""OpenAI's own schemas, to hold every body and chunk against."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema


def _nulls_allowed(schema: Any) -> Any:
    """The document marks null by `nullable`, which JSON Schema does not know."""
    if isinstance(schema, list):
        return [_nulls_allowed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _nulls_allowed(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    document = json.loads((Path(__file__).parent / "data" / "openai_schemas.json").read_text())
    return jsonschema.Draft202012Validator({**_nulls_allowed(document), "$ref": f"#/components/schemas/{name}"})


def check_answer(body: dict) -> None:
    """A whole answer of either endpoint."""
    name = {"chat.completion": "CreateChatCompletionResponse", "text_completion": "CreateCompletionResponse"}
    validator(name[body["object"]]).validate(body)


def check_chunk(chunk: dict) -> None:
    """A chunk of either endpoint. The document's chunks lack the null of finish_reason, and of usage."""
    filled = json.loads(json.dumps(chunk))
    for choice in filled["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    if filled.get("usage", 0) is None:
        del filled["usage"]
    name = {
        "chat.completion.chunk": "CreateChatCompletionStreamResponse",
        "text_completion": "CreateCompletionResponse",
    }
    validator(name[chunk["object"]]).validate(filled)


def check_error(body: dict) -> None:
    validator("ErrorResponse").validate(body)
