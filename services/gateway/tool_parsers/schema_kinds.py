"""What a tool's argument is in JSON, for formats that write all values as text: the kinds its schema allows, and the conversion.

A best reading, not a validation: what fits nothing stays a string, as the model wrote it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_DEEPEST = 16
_OF_PYTHON = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "NoneType": "null"}
_OF_PYTHON |= {"list": "array", "dict": "object"}
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}


def property_kinds(schema: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """JSON types that an argument may have; empty when nothing is known of it."""
    properties = (schema or {}).get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return _kinds(found, schema or {}, _DEEPEST)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _kinds(_resolved(schema["$ref"], root), root, depth - 1)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(each for each in given if isinstance(each, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(_OF_PYTHON[type(value).__name__] for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            arms = [_kinds(each, root, depth - 1) for each in schema[word]]
            # One arm that says nothing allows everything.
            return frozenset().union(*arms) if all(arms) else frozenset()
    return frozenset()


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def argument_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value that is not only ever a string."""
    said = _as_json(text, kinds)
    return said if said is not None else json.dumps(text, ensure_ascii=False)


def _as_json(text: str, kinds: frozenset[str]) -> str | None:
    """None for a string."""
    stripped = text.strip()
    said = _WORDS.get(stripped.lower(), stripped)
    try:
        value = json.loads(said, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _of_literal(stripped) if not kinds or kinds & {"array", "object"} else None
    kind = _OF_PYTHON[type(value).__name__]
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return said if fits else None


def _of_literal(text: str) -> str | None:
    """A Python list or dict, which models write where JSON was meant."""
    try:
        value = ast.literal_eval(text) if text[:1] in ("[", "{") else None
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, list | dict) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
