"""Tool calls as grammar, in the way the model's family writes them: Lark as llguidance reads it.

A `CallFrame` is what stands around calls; `call_rule` is one call of one tool, whose arguments follow its schema. Knows no
request: grammar.py puts the rules together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import BadParams
from services.gateway.structured import GUIDANCE, closed, quoted
from services.gateway.text_arguments import TextArguments
from services.gateway.tool_parsers import function_xml, mistral, pythonic
from services.gateway.tool_parsers.tagged import HERMES, LLAMA3_JSON
from services.gateway.tools import Tool

# As Python's json.dumps writes, which is what models were shown.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class CallFrame:
    """An answer's calls: `opener` (a tag, or none where calls begin the answer), `head`, a call, `tail`, `closer` (a tag or
    none). Several calls repeat all of it with `between` (`repeats_tags`), or only the call. first: the character that a bare
    call, and no other text, begins with. more_tags: others that the parser may meet."""

    opener: str = ""
    head: str = ""
    tail: str = ""
    closer: str = ""
    between: str = ""
    repeats_tags: bool = False
    first: str = ""
    more_tags: tuple[str, ...] = ()


_MISTRAL = (mistral.ARGS, mistral.CALL_ID)
FRAMES = {
    "hermes": CallFrame(HERMES.opener, "\n", "\n", HERMES.closer, "\n", repeats_tags=True),
    "llama3_json": CallFrame(between="; ", first="{", more_tags=(LLAMA3_JSON.opener,)),
    "qwen3_coder": CallFrame(function_xml.OPENER, "\n", "\n", function_xml.CLOSER, "\n", repeats_tags=True),
    "pythonic": CallFrame(head="[", tail="]", between=", ", first=r"\[", more_tags=(pythonic.OPENER, pythonic.CLOSER)),
    "mistral": CallFrame(mistral.OPENER, "[", "]", between=", ", more_tags=_MISTRAL),
    "mistral_args": CallFrame(mistral.OPENER, repeats_tags=True, more_tags=_MISTRAL),
}


class CallRules:
    """Rules of the calls of one answer. `lines` grows; methods return right-hand sides. tag: how a tag reads in the grammar.
    check: raises BadParams for a schema text that cannot be enforced, with the field's name."""

    def __init__(
        self, family: str, lines: list[str], tag: Callable[[str], str], check: Callable[[str, str], None]
    ) -> None:
        self._family, self._lines, self._tag, self._check = family, lines, tag, check
        self._arguments = TextArguments(lines)

    def call(self, tool: Tool, param: str) -> str:
        """One call of `tool`. `param` names its schema in the request."""
        schema: dict[str, Any] = closed({"type": "object", **(tool.function.parameters or {})})
        name, strict = tool.function.name, bool(tool.function.strict)
        match self._family:
            case "hermes" | "mistral":
                return self._object(name, "arguments", self._json(schema, strict, param))
            case "llama3_json":
                return self._object(name, "parameters", self._json(schema, strict, param))
            case "mistral_args":
                return f"{quoted(name)} {self._tag(mistral.ARGS)} {self._json(schema, strict, param)}"
        try:
            if self._family == "qwen3_coder":
                values = self._arguments.as_tags(schema, self._json, strict, param)
                return f'"<function={name}>\\n" {values} "</function>"'
            return f'"{name}(" {self._arguments.as_keywords(schema, self._json, strict, param)} ")"'
        except ValueError as error:
            raise BadParams(f"{param}: {error}", param) from None

    def _object(self, name: str, key: str, arguments: str) -> str:
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f'{quoted(head)} {arguments} "}}"'

    def _json(self, schema: Mapping[str, Any], strict: bool, param: str) -> str:
        """A value of the schema as JSON."""
        text = json.dumps({**schema, GUIDANCE: {**COMPACT, "lenient": not strict}}, ensure_ascii=False)
        self._check(text, param)
        return f"%json {text}"


def tags_of(family: str) -> tuple[str, ...]:
    """Texts of the family's tags, each of which may be a special token."""
    frame = FRAMES[family]
    return tuple(tag for tag in (frame.opener, frame.closer, *frame.more_tags) if tag)
