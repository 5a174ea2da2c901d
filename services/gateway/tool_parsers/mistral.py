"""Mistral's tool calls. Older models write `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, newer ones, for each call,
`[TOOL_CALLS]name[ARGS]{...}`, some with `[CALL_ID]id` before the arguments or without `[ARGS]`. All of them are read.
"""

from __future__ import annotations

import re

from services.gateway.events import CallArguments, CallStart, Content, Event
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.json_value import WHITESPACE, JsonValue, Step
from services.gateway.tool_parsers.tagged import CallSyntax, ToolCallParser

OPENER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]{1,64}\s*)?(?:\[ARGS\]\s*)?")
_HEAD_CHAR = re.compile(r"[A-Za-z0-9_.\-\[\] \t\r\n]")
_NAME_CHAR = re.compile(r"[A-Za-z0-9_.-]")
_LONGEST_HEAD = 200
_SYNTAX = CallSyntax(OPENER, "", bare=False)


class MistralParser(ToolCallParser):
    """The family with tags, whose calls may have their name before the arguments instead of in an object."""

    def __init__(self, rules: CallRules) -> None:
        super().__init__(_SYNTAX, rules)
        self._in_list = False

    def _enter(self, marker: str, gap: str) -> None:
        self._in_list = False
        super()._enter(marker, gap)

    def _seek(self, text: str, events: list[Event]) -> str:
        for index, char in enumerate(text):
            rest = (self._held + char).lstrip(WHITESPACE)
            if not self._markers and not self._in_list and _NAME_CHAR.match(rest):
                self._lead += self._held
                self._held, self._read = "", self._in_head
                return text[index:]
            if rest == "]" and self._markers and self._in_list:
                self._held, self._in_list = "", False
                continue
            self._in_list = self._in_list or (not self._markers and rest.startswith("["))
            left = super()._seek(char, events)
            if left or self._read != self._seek:
                return left + text[index + 1 :]
        return ""

    def _in_head(self, text: str, events: list[Event]) -> str:
        """From the name to the arguments' brace."""
        for index, char in enumerate(text):
            if char == "{" and (found := _HEAD.fullmatch(self._held)):
                self._lead += self._held
                self._held, self._read = "", self._in_call
                self._call = NamedArguments(self.num_calls, self._rules.new_id(), found.group(1))
                return text[index:]
            self._held += char
            if not _HEAD_CHAR.match(char) or len(self._held) > _LONGEST_HEAD:
                return self._no_call(self._held, events) + text[index + 1 :]
        return ""

    def finish(self) -> list[Event]:
        if self._read == self._in_head:
            return [Content(self._lead + self._held)]
        return super().finish()


class NamedArguments:
    """A call whose name is known: its arguments, from the brace on. As `CallObject` to the parser."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index = index
        self.started = False
        self.in_arguments = True
        self.unshown = ""
        self._start = CallStart(index, call_id, name)
        self._value = JsonValue()

    def skip_plain(self, text: str, start: int, events: list[Event]) -> int:
        end = self._value.plain_until(text, start)
        if end > start:
            events.append(CallArguments(self.index, text[start:end]))
        return end

    def feed(self, char: str, events: list[Event]) -> Step:
        if not self.started:
            self.started = True
            events.append(self._start)
        step = self._value.feed(char)
        if step is not Step.BAD:
            events.append(CallArguments(self.index, char))
        return step
