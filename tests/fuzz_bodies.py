"""Request bodies that nobody should send: good ones with a few things wrong, and bytes that are no JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    "speculation": [{"mode": "off"}, {"mode": "fixed:2", "max_draft_tokens": 1}, {"mark_drafted": True}],
    "text_class": ["code"],
    "chat_template_kwargs": [{"enable_thinking": False}, {"self": 1}],
    "best_of": [1, 2],
    "echo": [False, True],
    "suffix": ["", "x"],
    "tools": [[], [{"type": "function", "function": {"name": "f", "parameters": {}}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "add_special_tokens": [True, False],
    "return_token_strs": [True],
    "tokens": [[], [0], [47], [48]],
    "model": ["tiny", "other", ""],
}
_NUMBERS = [0, -1, 1, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**63, -(2**63) - 1, 10**400]
_STRINGS = ["", "x", "\x00", "\ud83d", "é" * 40, "NaN", "0" * 5000]
_LISTS: list[Any] = [[], [None], [[]], [1, "a"], ["a"] * 5, [True]]
_OBJECTS: list[Any] = [{}, {"": {}}, {"type": "text"}, {"role": "user"}, {"a": [{"b": [{}]}]}]
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
        yield Hostile(path, content, headers if dice.random() < 0.2 else {}, "timeout" in body)


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
    if kind < 0.94:
        return content
    if kind < 0.96:
        return content[: dice.randrange(len(content))]
    if kind < 0.98:
        spoiled = bytearray(content)
        spoiled[dice.randrange(len(spoiled))] = dice.randrange(256)
        return bytes(spoiled)
    return dice.choice((b"", b"null", b"[]", b'"x"', b"[" * 50_000, b"\xff\xfe\x00", b'{"a":' * 20_000, b"1" * 6000))
