"""What a piece of an answer's text adds to the assistant's message, and the seam where text becomes structure.

A `MessageParser` reads the text of one choice in pieces that may be cut anywhere, stop strings already taken out, and says
what each piece adds: content, reasoning, tool calls. Knows no tokens, no HTTP and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The first delta of a call has its id and name; `arguments` is what is added to their JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


NOTHING = MessageDelta()


class MessageParser(Protocol):
    """State of one choice. `push` may hold text back; `finish` gives out what was held, once, at the end."""

    def push(self, text: str) -> MessageDelta: ...

    def finish(self) -> MessageDelta: ...

    def finish_reason(self, reason: str) -> str:
        """The reason to report when the engine's is `reason`: `stop` may become `tool_calls`."""
        ...

    @property
    def num_thought(self) -> int | None:
        """Characters of the text up to the end of its thought, tags included: 0 without a thought, None while it lasts."""
        ...


class ContentOnly:
    """The text is the content."""

    num_thought = 0

    def push(self, text: str) -> MessageDelta:
        return MessageDelta(text) if text else NOTHING

    def finish(self) -> MessageDelta:
        return NOTHING

    def finish_reason(self, reason: str) -> str:
        return reason
