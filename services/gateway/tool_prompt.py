"""Tools for models whose chat template does not show them: Hermes' words in the system message, calls and results as text.

The wording is the one Hermes 2 Pro introduced and Qwen took over, which is what most small models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with earlier calls and their results as text."""
    return [_as_text(message) for message in messages]


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    told = [dict(message) for message in messages]
    if not tools:
        return told
    text = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{text}".lstrip()
        return told
    return [{"role": "system", "content": text}, *told]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {**plain, "role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return plain
    lines = [_call_text(call) for call in calls]
    return {**plain, "content": "\n".join(([message["content"]] if message["content"] else []) + lines)}


def _call_text(call: Any) -> str:
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    said = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
