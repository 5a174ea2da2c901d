"""How a model writes what is not plain text: its tool calls and its thoughts. Read off its chat template and tokenizer.

A template that shows tools in a way that none of our parsers reads, or shows none at all, gets Hermes' words for them put
into the system message by us (tool_prompt.py), so that tools work with any chat model.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field

from services.gateway.call_grammar import FRAMES, CallFrame, tags_of
from services.gateway.reasoning import CLOSE, OPEN
from services.gateway.tool_parsers import function_xml, mistral
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.call_parser import CallParser
from services.gateway.tool_parsers.function_xml import FunctionXmlParser
from services.gateway.tool_parsers.mistral import MistralParser
from services.gateway.tool_parsers.pythonic import PythonicParser
from services.gateway.tool_parsers.tagged import HERMES, LLAMA3_JSON, ToolCallParser
from services.model_card import ModelCard

# A list of calls as a template's instructions show it: `[func_name1(params_name1=...`.
_PYTHONIC = re.compile(r"\[\w+\(\w+=")


@dataclass(frozen=True, slots=True)
class Dialect:
    """calls: name of the syntax of tool calls. native_tools: the chat template shows tools itself. native_calls: it shows
    earlier calls and their results. thinks: answers may begin with a thought. special: those of the tags that are special
    tokens, by their text."""

    calls: str = "hermes"
    native_tools: bool = False
    native_calls: bool = False
    thinks: bool = False
    special: dict[str, int] = field(default_factory=dict)

    @property
    def frame(self) -> CallFrame:
        return FRAMES[self.calls]

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that the parsers must see."""
        return frozenset(self.special.values())

    def new_call_id(self) -> str:
        """Mistral's templates refuse ids that are not nine letters or digits."""
        name = uuid.uuid4().hex
        return name[:9] if self.calls.startswith("mistral") else f"call_{name[:24]}"

    def call_parser(self, rules: CallRules) -> CallParser:
        match self.calls:
            case "qwen3_coder":
                return FunctionXmlParser(rules)
            case "pythonic":
                return PythonicParser(rules)
            case "mistral" | "mistral_args":
                return MistralParser(rules)
        return ToolCallParser(HERMES if self.calls == "hermes" else LLAMA3_JSON, rules)


def dialect_of(card: ModelCard, *, tool_format: str = "auto", reasoning: str = "auto") -> Dialect:
    """tool_format: `auto` or one of FRAMES. reasoning: `auto`, `think` or `off`. A format that is set although the template
    shows another of ours is told to the model in our words; where the template's own is not known, it is believed."""
    added = json.loads(card.tokenizer_json).get("added_tokens", [])
    native = _native_format(card.chat_template)
    calls = tool_format if tool_format != "auto" else native or "hermes"
    believed = native is None and tool_format != "auto" and "tools" in card.chat_template
    thinks = CLOSE in card.chat_template or any(token["content"] == CLOSE for token in added)
    thinks = reasoning == "think" or (reasoning == "auto" and thinks)
    tags = (*tags_of(calls), *((OPEN, CLOSE) if thinks else ()))
    special = {token["content"]: token["id"] for token in added if token["special"] and token["content"] in tags}
    return Dialect(calls, native == calls or believed, "tool_calls" in card.chat_template, thinks, special)


def _native_format(template: str) -> str | None:
    """The syntax of ours in which a chat template shows tools."""
    if "tools" not in template:
        return None
    if mistral.OPENER in template:
        return "mistral_args" if mistral.ARGS in template else "mistral"
    if function_xml.FUNCTION in template:
        return "qwen3_coder" if function_xml.PARAMETER in template else None
    if _PYTHONIC.search(template):
        return "pythonic"
    if LLAMA3_JSON.opener in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return "hermes" if HERMES.opener in template else None
