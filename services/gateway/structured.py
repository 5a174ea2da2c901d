"""What the text of an answer must match, as clients say it: OpenAI's `response_format` and vLLM's `structured_outputs`.

Turns either into one `Constraint`. `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` are older spellings of
the latter. Knows no tools and no model; grammar.py makes the engine's grammar.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.errors import BadParams

MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """kind: `json_object`, `json_schema`, `regex` or `ebnf`, as in wire.Grammar. text: the schema as JSON with our rules for
    whitespace in it, the expression, or the grammar. param: the field that it came from."""

    kind: str
    text: str
    param: str


class SchemaFormat(BaseModel):
    """strict: what the schema has and cannot be enforced is refused; else it is passed over. The rest is enforced always."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """Exactly one of json, regex, choice, grammar and json_object. json: a schema, or its JSON text. regex: Rust syntax.
    grammar: Lark as llguidance reads it, or GBNF. whitespace_pattern, disable_any_whitespace: between JSON tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


_GUIDED = {"guided_json": "json_", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


_OLD: dict[str, Any] = {"deprecated": True}


class StructuredFields(BaseModel):
    """The fields of a request that constrain its text; both endpoints take them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, json_schema_extra=_OLD)
    guided_regex: str | None = Field(None, json_schema_extra=_OLD)
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, json_schema_extra=_OLD
    )
    guided_grammar: str | None = Field(None, json_schema_extra=_OLD)

    def constraint(self) -> Constraint | None:
        """Raises BadParams when there are several, or one that says nothing."""
        found = [each for each in (self._of_format(), self._of_outputs(), *self._of_guided()) if each is not None]
        if len(found) > 1:
            raise BadParams(f"{found[1].param}: the answer is already constrained by {found[0].param}", found[1].param)
        return found[0] if found else None

    def _of_format(self) -> Constraint | None:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return Constraint("json_schema", _schema_text({"type": "object"}), "response_format")
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            missing = "response_format.json_schema" + (".schema" if asked.json_schema is not None else "")
            raise BadParams(f"{missing}: is required with type json_schema", missing)
        text = _schema_text(asked.json_schema.schema_, lenient=not asked.json_schema.strict)
        return Constraint("json_schema", text, "response_format.json_schema.schema")

    def _of_outputs(self) -> Constraint | None:
        return None if self.structured_outputs is None else _constraint(self.structured_outputs, "structured_outputs")

    def _of_guided(self) -> list[Constraint]:
        found = []
        for name, key in _GUIDED.items():
            value = getattr(self, name)
            if value is not None:
                found.append(_constraint(StructuredOutputs(**{key: value}), name, short=True))
        return found


def _constraint(asked: StructuredOutputs, param: str, *, short: bool = False) -> Constraint:
    """`short`: the field is the constraint itself, not an object around it."""
    given = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": asked.json_object or None,
    }
    kinds = [kind for kind, value in given.items() if value is not None]
    if len(kinds) != 1:
        raise BadParams(f"{param}: exactly one of {', '.join(given)} is needed, got {len(kinds)}", param)
    kind, name = kinds[0], param if short else f"{param}.{kinds[0]}"
    match kind:
        case "regex":
            return Constraint("regex", asked.regex or "", name)
        case "choice":
            return Constraint("ebnf", "start: " + " | ".join(quoted(each) for each in asked.choice or ()) + "\n", name)
        case "grammar":
            return Constraint("ebnf", asked.grammar or "", name)
    schema = {"type": "object"} if kind == "json_object" else _parsed_schema(asked.json_, name)
    return Constraint("json_schema", _schema_text(schema, asked), name)


def _parsed_schema(schema: dict[str, Any] | str | None, param: str) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadParams(f"{param}: not valid JSON: {error}", param) from None
    if not isinstance(schema, dict):
        raise BadParams(f"{param}: a schema must be a JSON object", param)
    return schema


def quoted(text: str) -> str:
    """A string as Lark writes it, which is JSON's way."""
    return json.dumps(text, ensure_ascii=False)


# Bounded, so that a model cannot fill its answer with line breaks.
WHITESPACE = r"[ \t\r\n]{1,20}"
GUIDANCE = "x-guidance"


def _schema_text(schema: dict[str, Any], asked: StructuredOutputs | None = None, *, lenient: bool = False) -> str:
    """The schema with what llguidance must know beside it."""
    options: dict[str, Any] = {"lenient": lenient}
    if asked is not None and asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = (asked.whitespace_pattern if asked else None) or WHITESPACE
    if asked is not None and asked.disable_additional_properties:
        schema = closed(schema)
    return json.dumps({**schema, GUIDANCE: options}, ensure_ascii=False)


_OPEN_SHAPES = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
)


def closed(schema: Any) -> Any:
    """The schema without further properties where it lists some and does not speak of others: less is allowed, and all of
    it matches the original."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed_member(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(shape in schema for shape in _OPEN_SHAPES):
        found["additionalProperties"] = False
    return found


def _closed_member(key: str, value: Any) -> Any:
    """Only what holds schemas is gone into: a property may be called `properties`, and constants are data."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: closed(each) for name, each in value.items()}
    return closed(value) if key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties") else value
