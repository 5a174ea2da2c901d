"""Request bodies that nobody should send: good ones with a few things wrong, and bytes that are no JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {}}},
    {
        "type": "function",
        "function": {
            "name": "g",
            "description": "\ud83d é" * 30,
            "parameters": {"type": "object", "properties": {"a": {"enum": ["x", 1, None]}, "b": {"$ref": "#/$defs/c"}}},
            "strict": True,
        },
    },
]


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


DEEP_TOOL: Any = {"type": "function", "function": {"name": "deep", "parameters": nested(200)}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 4},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}
# Values that are right somewhere, by field, so that deep paths are reached too.
SENSIBLE: dict[str, list[Any]] = {
    "messages": [
        [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "é😀"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 3}],
        [{"role": "system", "content": "only rules"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "x", "name": "n" * 5000}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}],
    ],
    "prompt": ["", "x" * 300, ["a", "b"], [1, 2, 47], [[1], [2, 3]], [48], ["a"] * 70],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"include_usage": False, "x": 1}],
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 2, 1e-9],
    "top_p": [1, 0.1, 5e-324],
    "top_k": [-1, 0, 1, 40, 2**62],
    "min_p": [0, 1],
    "seed": [0, -1, 2**63 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 0.5],
    "repetition_penalty": [0.5, 1.3],
    "logit_bias": [{"3": -100}, {"3": 100, "4": 1.5}, {"47": 1}, {"48": 1}, {}],
    "max_tokens": [1, 7, 60],
    "max_completion_tokens": [1, 5],
    "min_tokens": [0, 2],
    "stop": ["e", ["a", "b", "cd", "efg"], "\n" * 50, "😀"],
    "stop_token_ids": [[], [3], [47, 48]],
    "ignore_eos": [True],
    "logprobs": [True, False, 0, 3],
    "top_logprobs": [0, 5],
    "timeout": [30, 1e9],
    "priority": [-5, 5],
    "speculation": [
        {"mode": "off"},
        {"mode": "fixed:2", "max_draft_tokens": 1},
        {"mark_drafted": True},
        {"mode": "fixed:9" + "0" * 30},
    ],
    "text_class": ["code"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"self": 1}],
    "best_of": [1, 2],
    "echo": [False, True],
    "suffix": ["", "x"],
    "tools": [[], TOOLS[:1], TOOLS, [*TOOLS, DEEP_TOOL], [TOOLS[0]] * 2],
    "tool_choice": [
        "auto",
        "none",
        "required",
        named("f"),
        named("gone"),
        allowed("auto", "f"),
        allowed("required", "g", "f"),
        allowed("auto", "gone"),
        allowed("never"),
    ],
    "parallel_tool_calls": [True, False],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {}},
        schema_format({"type": "string"}),
        schema_format(nested(60)),
        schema_format({"$ref": "#"}, strict=True),
        schema_format({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}),
        schema_format({"type": "integer", "minimum": 1e308, "multipleOf": 1e-300}),
        schema_format({"enum": ["\ud83d", "x" * 9000]}),
    ],
    "structured_outputs": [
        {},
        {"regex": "[a-z]{1,5}"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a"+'},
        {"json": {}},
    ],
    "guided_regex": ["a|b", "(a{1,90}){1,90}", "(?=x)", "[", "[a-z]{999999}", ""],
    "guided_json": [{"type": "object"}, nested(30), "{", "null"],
    "guided_choice": [["yes", "no"], [""], ["x"] * 1025],
    "guided_grammar": ['start: "x"', "start: start", "root ::= root", "%llguidance {}", 'start: %json {"type": 1}'],
    "add_special_tokens": [True, False],
    "return_token_strs": [True],
    "tokens": [[], [0], [47], [48]],
    "model": ["tiny", "other", ""],
}
_NUMBERS = [0, -1, 1, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**400]
_STRINGS = ["", "x", "\x00", "\ud83d", "é" * 40, "NaN", "0" * 5000]
_LISTS: list[Any] = [[], [None], [[]], [1, "a"], ["a"] * 5, [True]]
_OBJECTS: list[Any] = [{}, {"": {}}, {"type": "text"}, {"role": "user"}, {"a": [{"b": [{}]}]}]
_TYPES = ("text/plain", "multipart/form-data; boundary=x", "application/json; charset=utf-16", "x", "")
JUNK: list[Any] = [None, True, False, *_NUMBERS, *_STRINGS, *_LISTS, *_OBJECTS]


@dataclass(frozen=True, slots=True)
class Hostile:
    """may_time_out: a 504 is a good answer to it."""

    path: str
    content: bytes
    headers: dict[str, str]
    may_time_out: bool


def hostile_bodies(count: int, seed: int) -> Iterator[Hostile]:
    """The same for the same seed."""
    dice = random.Random(seed)
    for _ in range(count):
        path = dice.choice(list(GOOD))
        body = {**GOOD[path]}
        if dice.random() < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": dice.random() < 0.5}}
        for _ in range(dice.choice((0, 1, 1, 2, 3, 5))):
            _change(dice, body)
        headers = {"x-speculation": dice.choice(("off", "fixed:2", "", "junk=1", ";;", "max_draft_tokens=3"))}
        content = _encoded(dice, body)
        headers = headers if dice.random() < 0.2 else {}
        if dice.random() < 0.05:
            headers = {**headers, "content-type": dice.choice(_TYPES)}
        yield Hostile(path, content, headers, "timeout" in body)


def _change(dice: random.Random, body: dict[str, Any]) -> None:
    name = dice.choice(list(SENSIBLE))
    kind = dice.random()
    if kind < 0.55:
        body[name] = dice.choice(SENSIBLE[name])
    elif kind < 0.8:
        body[name] = dice.choice(JUNK)
    elif kind < 0.9:
        body.pop(dice.choice(list(body)), None) if body else None
    else:
        key = dice.choice(list(body) or ["x"])
        body[key] = _spoiled(dice, body.get(key))


def _spoiled(dice: random.Random, value: Any) -> Any:
    """The same with something inside it exchanged."""
    if isinstance(value, dict) and value:
        key = dice.choice(list(value))
        return {**value, key: _spoiled(dice, value[key])}
    if isinstance(value, list) and value:
        at = dice.randrange(len(value))
        return [*value[:at], _spoiled(dice, value[at]), *value[at + 1 :]]
    return dice.choice(JUNK)


def _encoded(dice: random.Random, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    kind = dice.random()
    if kind < 0.9:
        return content
    if kind < 0.94:
        return _respelled(dice, body, content)
    if kind < 0.96:
        return content[: dice.randrange(len(content))]
    if kind < 0.98:
        spoiled = bytearray(content)
        spoiled[dice.randrange(len(spoiled))] = dice.randrange(256)
        return bytes(spoiled)
    return dice.choice((b"", b"null", b"[]", b'"x"', b"[" * 50_000, b"\xff\xfe\x00", b'{"a":' * 20_000, b"1" * 6000))


def _respelled(dice: random.Random, body: dict[str, Any], content: bytes) -> bytes:
    """Nearly the same body: another encoding, keys twice, numbers that JSON has not, a value too deep, something behind it."""
    field = json.dumps(dice.choice(list(body) or ["x"]))
    deep = dice.choice((50, 2000))
    values = (
        "NaN",
        "-Infinity",
        "1e999",
        "-0",
        "1E400",
        "[" * deep + "]" * deep,
        '{"a":' * deep + "1" + "}" * deep,
        '"\\ud83d"',
    )
    twice = f"{content.decode()[:-1]}{', ' if body else ''}{field}: {dice.choice(values)}}}".encode()
    others = (
        b"\xef\xbb\xbf" + content,
        content.decode().encode("utf-16"),
        content.decode().encode("utf-32-le"),
        content + b"{}",
        b" " * 3000 + content + b"\n",
        content.replace(b'"', b"'"),
        json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"),
    )
    return twice if dice.random() < 0.6 else dice.choice(others)
