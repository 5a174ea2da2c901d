"""One answer's text to what it adds to the message: the thought taken off, then the tool calls.

Implements `MessageParser` (message_delta.py) with the parsers of the model's dialect.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.dialect import Dialect
from services.gateway.events import CallArguments, CallStart, Content, Event, Reasoning
from services.gateway.message_delta import NOTHING, MessageDelta, ToolCallDelta
from services.gateway.reasoning import ReasoningSplitter
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tools import ToolUse


class AnswerParser:
    """`opened`: the prompt ends inside a thought. Thoughts are never searched for calls."""

    def __init__(self, dialect: Dialect, use: ToolUse, *, opened: bool) -> None:
        self._thought = ReasoningSplitter(opened=opened) if dialect.thinks else None
        self._calls = dialect.call_parser(_rules(dialect, use)) if use.callable else None

    def push(self, text: str) -> MessageDelta:
        events = self._thought.push(text) if self._thought else [Content(text)]
        return _delta(self._with_calls(events))

    def finish(self) -> MessageDelta:
        events = self._with_calls(self._thought.finish()) if self._thought else []
        return _delta(events + (self._calls.finish() if self._calls else []))

    def finish_reason(self, reason: str) -> str:
        called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def num_thought(self) -> int | None:
        return self._thought.num_thought if self._thought else 0

    def _with_calls(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event.text) if self._calls and isinstance(event, Content) else [event]
        return found


def _rules(dialect: Dialect, use: ToolUse) -> CallRules:
    schemas = {tool.function.name: tool.function.parameters or {} for tool in use.callable}
    return CallRules(dialect.new_call_id, use.names, schemas=schemas)


def _delta(events: Iterable[Event]) -> MessageDelta:
    content, reasoning = [], []
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(index, call_id, name):
                calls[index] = ToolCallDelta(index, call_id, name)
            case CallArguments(index, text):
                known = calls.get(index, ToolCallDelta(index))
                calls[index] = ToolCallDelta(index, known.id, known.name, known.arguments + text)
    return MessageDelta("".join(content), "".join(reasoning), tuple(calls.values())) or NOTHING
