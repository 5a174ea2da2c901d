"""Tools for models whose chat template does not show them: words for them in the system message, calls and results as text.

The wording is the one Hermes 2 Pro introduced and Qwen took over, which is what most small models have seen; what differs by
format is how a call is written.
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
_AFTER = "\n</tools>\n\nFor each function call, return "
_CODER = """<tool_call>
<function=function-name>
<parameter=parameter-name>
value
</parameter>
</function>
</tool_call>"""
_ASKED = {
    "hermes": """a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""",
    "llama3_json": """a json object with function name and arguments, and nothing else:
{"name": <function-name>, "parameters": <args-json-object>}""",
    "qwen3_coder": f"an XML object with function name and parameters within <tool_call></tool_call> XML tags:\n{_CODER}",
    "pythonic": """an item of a list of calls, and nothing else:
[function_name(parameter_name="value", other_name=1)]""",
    "mistral": """an item of a json list:
[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]""",
    "mistral_args": """the function name and a json object with the arguments:
[TOOL_CALLS]<function-name>[ARGS]<args-json-object>""",
}


def calls_as_text(messages: Sequence[Mapping[str, Any]], calls: str) -> list[dict[str, Any]]:
    """The conversation with earlier calls and their results as text. calls: the format's name."""
    return [_as_text(message, calls) for message in messages]


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, calls: str
) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    told = [dict(message) for message in messages]
    if not tools:
        return told
    text = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER + _ASKED[calls]
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{text}".lstrip()
        return told
    return [{"role": "system", "content": text}, *told]


def _as_text(message: Mapping[str, Any], calls: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {**plain, "role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    made = message.get("tool_calls")
    if not isinstance(made, list) or not made:
        return plain
    functions = [call.get("function", {}) if isinstance(call, Mapping) else {} for call in made]
    said = _calls_text(calls, [(each.get("name"), each.get("arguments")) for each in functions])
    return {**plain, "content": f"{message['content']}\n{said}" if message["content"] else said}


def _calls_text(calls: str, made: Sequence[tuple[Any, Any]]) -> str:
    """Calls as the model writes them itself."""
    match calls:
        case "qwen3_coder":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n{_tags(given)}</function>\n</tool_call>" for name, given in made
            )
        case "pythonic":
            return f"[{', '.join(f'{name}({_keywords(given)})' for name, given in made)}]"
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in made)
        case "mistral":
            return f"[TOOL_CALLS]{_json([{'name': name, 'arguments': given} for name, given in made])}"
        case "llama3_json":
            return "; ".join(_json({"name": name, "parameters": given}) for name, given in made)
    return "\n".join(f"<tool_call>\n{_json({'name': name, 'arguments': given})}\n</tool_call>" for name, given in made)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tags(given: Any) -> str:
    members = given.items() if isinstance(given, Mapping) else ()
    texts = [(key, value if isinstance(value, str) else _json(value)) for key, value in members]
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)


def _keywords(given: Any) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in given.items()) if isinstance(given, Mapping) else ""
