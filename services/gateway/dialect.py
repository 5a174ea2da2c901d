"""How a model writes what is not plain text: its tool calls and its thoughts. Read off its chat template and tokenizer.

A template that shows tools in a way that none of our parsers reads, or shows none at all, gets Hermes' words for them put
into the system message by us (tool_prompt.py), so that tools work with any chat model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from services.gateway.reasoning import CLOSE, OPEN
from services.gateway.tool_parsers.tagged import HERMES, LLAMA3_JSON, CallSyntax
from services.model_card import ModelCard

SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
ARGUMENTS_KEY = {"hermes": "arguments", "llama3_json": "parameters"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """calls: name of the syntax of tool calls. native_tools: the chat template shows tools in that syntax itself.
    native_calls: it shows earlier calls and their results. thinks: answers may begin with a thought. special: those of the
    tags that are special tokens, by their text."""

    calls: str = "hermes"
    native_tools: bool = False
    native_calls: bool = False
    thinks: bool = False
    special: dict[str, int] = field(default_factory=dict)

    @property
    def syntax(self) -> CallSyntax:
        return SYNTAXES[self.calls]

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that the parsers must see."""
        return frozenset(self.special.values())


def dialect_of(card: ModelCard, *, tool_format: str = "auto", reasoning: str = "auto") -> Dialect:
    """tool_format: `auto`, `hermes` or `llama3_json`. reasoning: `auto`, `think` or `off`."""
    added = json.loads(card.tokenizer_json).get("added_tokens", [])
    native = _native_format(card.chat_template)
    calls = tool_format if tool_format != "auto" else native or "hermes"
    thinks = CLOSE in card.chat_template or any(token["content"] == CLOSE for token in added)
    thinks = reasoning == "think" or (reasoning == "auto" and thinks)
    tags = [SYNTAXES[calls].opener, SYNTAXES[calls].closer, *((OPEN, CLOSE) if thinks else ())]
    special = {token["content"]: token["id"] for token in added if token["special"] and token["content"] in tags}
    return Dialect(calls, native == calls, "tool_calls" in card.chat_template, thinks, special)


def _native_format(template: str) -> str | None:
    """The syntax of ours in which a chat template shows tools."""
    if "tools" not in template:
        return None
    if LLAMA3_JSON.opener in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    # Qwen3-Coder and others put XML where Hermes has JSON.
    if HERMES.opener in template and "<function=" not in template:
        return "hermes"
    return None
