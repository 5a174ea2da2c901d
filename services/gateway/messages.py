"""Chat messages as the API takes them and as chat templates want them. Knows no template and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator


class Message(BaseModel):
    """content: text, or text parts, which are joined by line breaks as other servers do. Other fields (name, tool_calls,
    tool_call_id, reasoning_content) reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        if isinstance(content, list):
            return "\n".join(_part_text(part) for part in content)
        raise ValueError("must be a string or a list of text parts")

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        for name in ("audio", "function_call"):
            if message.get(name) is not None:
                raise ValueError(f"{name} is not supported by this server")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError("content is required")
        if not _are_calls(message.get("tool_calls")):
            raise ValueError("tool_calls must be a list of objects with function.name and function.arguments")
        return message

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: `developer` is the newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        return {**extra, "role": role, "content": self.content} | _template_calls(extra.get("tool_calls"))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else None
    if isinstance(text, str):
        return text
    if kind in ("text", "refusal"):
        raise ValueError(f"a content part of type {kind!r} needs a string {kind!r}")
    raise ValueError(f"content part of type {str(kind)[:40]!r} is not supported; only text parts are")


def _are_calls(calls: Any) -> bool:
    if calls is None:
        return True
    return isinstance(calls, list) and all(
        isinstance(each, Mapping) and _is_function(each.get("function")) for each in calls
    )


def _is_function(made: Any) -> bool:
    """Arguments are JSON text; some clients send back the object that they read from it."""
    if not isinstance(made, Mapping):
        return False
    return isinstance(made.get("name"), str) and isinstance(made.get("arguments", ""), str | Mapping)


def _template_calls(tool_calls: Any) -> dict[str, Any]:
    """Earlier tool calls of a conversation: templates want their arguments as objects, the wire has JSON text."""
    if not isinstance(tool_calls, list):
        return {}
    return {"tool_calls": [_parsed_call(call) for call in tool_calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
