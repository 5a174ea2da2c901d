"""Grammar of arguments that are not one JSON object: values between tags (Qwen3-Coder) and keywords (pythonic).

Text values are held to what JSON schema says of strings (enum, const, lengths, pattern); all other values are JSON. ValueError
says what a strict schema has and such text cannot be held to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from services.gateway.structured import quoted
from services.gateway.tool_parsers.function_xml import END_FUNCTION, END_PARAMETER, PARAMETER
from services.gateway.tool_parsers.schema_kinds import property_kinds

Json = Callable[[Mapping[str, Any], bool, str], str]
_KEYWORD = re.compile(r"[A-Za-z_][\w.-]{0,255}")
_TAG_KEY = re.compile(r"[^<>\r\n]{1,256}")
_SAYS_NOTHING = {"type", "title", "description", "default", "examples", "enum", "const", "deprecated"}
_OF_STRINGS = _SAYS_NOTHING | {"minLength", "maxLength", "pattern", "anyOf"}
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "dependentRequired")


def _escaped(text: str) -> str:
    return text.replace("/", "\\/")


_NEVER = "|".join(_escaped(tag) for tag in (PARAMETER, END_FUNCTION))
_END = f"\\n{_escaped(END_PARAMETER)}"
# Up to the first closing tag, and none of the tags that the parser would end the value at before it.
_VALUE = f"& ~/(?s:.*)({_NEVER})(?s:.*)/ & ~/(?s:.*){_escaped(END_PARAMETER)}(?s:.+)/"


class TextArguments:
    """Adds rules to `lines`, each under a name of its own."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._names: Iterator[int] = iter(range(10**9))

    def as_tags(self, schema: Mapping[str, Any], json_rule: Json, strict: bool, param: str) -> str:
        """`<parameter=KEY>`, line break, value, line break, `</parameter>`, line break; keys in the schema's order."""
        members = _members(schema, strict)
        if members is None:
            return f'("{PARAMETER}" /[A-Za-z_][A-Za-z0-9_]*/ ">\\n" {self._text("(?s:.*)")} "\\n")*'
        parts = []
        for key, value, required in members:
            _check_key(key, _TAG_KEY)
            found = self._tagged(value, schema, json_rule, strict, f"{param}.properties.{key[:64]}")
            part = f'{quoted(f"{PARAMETER}{key}>" + chr(10))} {found} "\\n"'
            parts.append(part if required else f"({part})?")
        return " ".join(parts)

    def _tagged(self, value: Any, root: Mapping[str, Any], json_rule: Json, strict: bool, param: str) -> str:
        """A value and its closing tag."""
        kinds = property_kinds({**root, "properties": {"it": value}}, "it")
        if kinds and "string" not in kinds:
            return f"{json_rule(_with_definitions(value, root), strict, param)} {quoted(chr(10) + END_PARAMETER)}"
        options = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
        if isinstance(options, list):
            texts = [each if isinstance(each, str) else json.dumps(each) for each in options]
            said = [text for text in texts if not any(tag in text for tag in (PARAMETER, END_FUNCTION, END_PARAMETER))]
            if not said or (strict and said != texts):
                raise ValueError(f"{param}: none of the values, or not all, can be written between tags")
            return f"({' | '.join(quoted(each) for each in said)}) {quoted(chr(10) + END_PARAMETER)}"
        unknown = sorted(set(value) - _OF_STRINGS) if isinstance(value, dict) and strict else []
        if unknown:
            raise ValueError(f"{param}: {unknown[0]} cannot be enforced in text between tags")
        return self._text(_string_regex(value if isinstance(value, dict) else {}, kinds, strict, param))

    def _text(self, regex: str) -> str:
        name = f"{next(self._names)}"
        self._lines.append(f"VALUE_{name}: /{regex}{_END}/ {_VALUE}\nvalue_{name}[lazy]: VALUE_{name}")
        return f"value_{name}"

    def as_keywords(self, schema: Mapping[str, Any], json_rule: Json, strict: bool, param: str) -> str:
        """`key=value, key=value` in the schema's order. Values are JSON, but for Python's words for true, false and null."""
        members = _members(schema, strict)
        if members is None:
            item = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {json_rule({}, False, param)}'
            return f'({item} (", " {item})*)?'
        name = next(self._names)
        # Two rules for each place: nothing was written yet, or something was.
        rest = [f"args_{name}_{at}" for at in range(len(members) + 1)]
        for at, (key, value, required) in enumerate(members):
            _check_key(key, _KEYWORD)
            item = f"{quoted(key + '=')} {self._literal(value, schema, json_rule, strict, param)}"
            for suffix, separator in (("f", ""), ("r", '", " ')):
                skip = "" if required else f" | {rest[at + 1]}_{suffix}"
                self._lines.append(f"{rest[at]}_{suffix}: {separator}{item} {rest[at + 1]}_r{skip}")
        self._lines += [f'{rest[-1]}_{suffix}: ""' for suffix in ("f", "r")]
        return f"{rest[0]}_f"

    def _literal(self, value: Any, root: Mapping[str, Any], json_rule: Json, strict: bool, param: str) -> str:
        kinds = property_kinds({**root, "properties": {"it": value}}, "it")
        plain = not isinstance(value, dict) or not set(value) - (_SAYS_NOTHING - {"enum", "const"})
        if kinds == {"boolean"} and plain:
            return '("True" | "False")'
        return json_rule(_with_definitions(value, root), strict, param)


def _members(schema: Mapping[str, Any], strict: bool) -> list[tuple[str, Any, bool]] | None:
    """(key, schema, required) of each argument, or None when any may be given."""
    properties = schema.get("properties")
    spoken = sorted(set(schema) & set(_OPEN))
    if strict and spoken:
        raise ValueError(f"{spoken[0]} cannot be enforced in this model's way of writing calls")
    if not isinstance(properties, Mapping):
        return None
    needed = schema.get("required")
    required = [each for each in needed if isinstance(each, str)] if isinstance(needed, list) else []
    missing: dict[str, Any] = {key: {} for key in required if key not in properties}
    return [(key, value, key in required) for key, value in {**properties, **missing}.items()]


def _check_key(key: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(key):
        raise ValueError(f"the argument name {key[:64]!r} cannot be written in this model's way of writing calls")


def _with_definitions(value: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument with what its references point to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **(value if isinstance(value, Mapping) else {})}


def _string_regex(value: Mapping[str, Any], kinds: frozenset[str], strict: bool, param: str) -> str:
    """What a text value may be. A lax schema's pattern that is none for the grammar is passed over."""
    low, high, pattern = value.get("minLength"), value.get("maxLength"), value.get("pattern")
    if kinds != {"string"} and strict and "anyOf" in value:
        raise ValueError(f"{param}: anyOf cannot be enforced in text between tags")
    if isinstance(pattern, str) and low is high is None and not re.search(r"\(\?[=!<]|\\[bBdDwWsS]|[/\n]", pattern):
        start = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$") if not end else pattern.removeprefix("^")
        if not re.search(r"(?<![\\\[])[\^$]", inner):
            return f"{start}({inner}){end}"
    if isinstance(pattern, str) and strict:
        raise ValueError(f"{param}: this pattern cannot be enforced in text between tags")
    if isinstance(low, int) or isinstance(high, int):
        return f"(?s:.{{{low or 0},{high if isinstance(high, int) else ''}}})"
    return "(?s:.*)"
