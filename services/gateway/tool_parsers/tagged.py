"""Splits an answer's text into content and tool calls that are written as JSON objects, with or without tags around.

Two families: Hermes and Qwen write `<tool_call>{...}</tool_call>`, Llama 3 writes bare objects or `<|python_tag|>{...}`.
Text is only ever read forward, a character decides the same wherever the pieces were cut, and text that turns out to be
no call comes out as content, tags included. Knows no tools: which names are calls is `CallRules`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from services.gateway.events import CallArguments, Content, Event, joined
from services.gateway.tool_parsers.call_object import CallObject, CallRules
from services.gateway.tool_parsers.call_parser import first_of, undecided
from services.gateway.tool_parsers.json_value import WHITESPACE, Step


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """opener, closer: the tags around calls; a family without a closing tag has "". bare: an answer may begin with a
    call that has no opener; it must then look like one in all its keys and name a declared tool, since any JSON answer
    begins with a brace."""

    opener: str
    closer: str
    bare: bool


HERMES = CallSyntax("<tool_call>", "</tool_call>", bare=False)
LLAMA3_JSON = CallSyntax("<|python_tag|>", "", bare=True)


class OneCall(Protocol):
    """A call that is being read, as `CallObject`."""

    index: int
    started: bool
    in_arguments: bool

    @property
    def unshown(self) -> str: ...

    def skip_plain(self, text: str, start: int, events: list[Event]) -> int: ...

    def feed(self, char: str, events: list[Event]) -> Step: ...


class ToolCallParser:
    """`push` returns what became certain, `finish` the rest at the end of the text."""

    def __init__(self, syntax: CallSyntax, rules: CallRules) -> None:
        self._syntax = syntax
        self._rules = replace(rules, only_call_keys=True) if syntax.bare else replace(rules, names=None)
        self.num_calls = 0
        self._unclosed = self._only_calls = False
        self._held = ""
        self._lead = ""
        self._call: OneCall | None = None
        self._read = self._outside
        if syntax.bare:
            self._seek_call("", skip=WHITESPACE, markers=(syntax.opener,))

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._read(text, events)
        return joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        held, self._held = self._held, ""
        if self._read == self._in_raw_arguments:
            events.append(CallArguments(self.num_calls - 1, held))
        elif self._read == self._in_call and self._call is not None:
            if not self._call.started:
                events.append(Content(self._lead + self._call.unshown))
            elif self._call.unshown.strip(WHITESPACE):
                events.append(Content(self._call.unshown))
        elif not self._is_layout(held):
            events.append(Content(self._lead + held))
        return joined(events)

    def _is_layout(self, held: str) -> bool:
        """Whitespace, or a beginning of the closing tag, right after a call."""
        left = held.strip(WHITESPACE)
        half_closed = self._read == self._seek and self._syntax.closer.startswith(left)
        return self._only_calls and not self._lead and (not left or half_closed)

    def _outside(self, text: str, events: list[Event]) -> str:
        """Content, up to a tag. Whitespace before a tag is held back: it belongs to the call's layout."""
        window = self._held + text
        markers = (self._syntax.opener, self._syntax.closer) if self._unclosed else (self._syntax.opener,)
        found = first_of(window, markers)
        if found is None:
            shown = len(window) - undecided(window, markers)
            self._show(window[:shown], events)
            self._held = window[shown:]
            return ""
        at, marker = found
        content = window[:at].rstrip(WHITESPACE)
        self._show(content, events)
        self._enter(marker, window[len(content) : at])
        return window[at + len(marker) :]

    def _show(self, content: str, events: list[Event]) -> None:
        self._only_calls = self._only_calls and not content
        events.append(Content(content))

    def _enter(self, marker: str, gap: str) -> None:
        self._held = self._lead = ""
        if marker == self._syntax.opener:
            self._seek_call(gap + marker, skip=WHITESPACE if self._syntax.bare else WHITESPACE + "[", markers=())
        else:
            self._unclosed, self._read = False, self._outside

    def _seek_call(self, lead: str, skip: str, markers: tuple[str, ...]) -> None:
        """`lead`: what was read and is content if no call comes."""
        self._lead, self._held, self._skip, self._markers = lead, "", skip, markers
        self._read = self._seek

    def _seek(self, text: str, events: list[Event]) -> str:
        """Where a call may begin: a brace or a tag after characters that may be skipped."""
        for index, char in enumerate(text):
            self._held += char
            rest = self._held.lstrip(self._skip)
            if rest == "{":
                self._lead += self._held[:-1]
                self._held, self._read = "", self._in_call
                self._call = CallObject(self.num_calls, self._rules)
                return text[index + 1 :]
            if rest in self._markers:
                self._enter(rest, self._lead + self._held[: -len(rest)])
                return text[index + 1 :]
            if rest and not any(marker.startswith(rest) for marker in self._markers):
                return self._no_call(self._held, events) + text[index + 1 :]
        return ""

    def _no_call(self, unread: str, events: list[Event]) -> str:
        """What was read as a call is content: the lead now, the rest is read again as content."""
        self._show(self._lead, events)
        self._lead = self._held = ""
        self._read = self._outside
        return unread

    def _in_call(self, text: str, events: list[Event]) -> str:
        assert self._call is not None
        at = 0
        while (at := self._call.skip_plain(text, at, events)) < len(text):
            step = self._call.feed(text[at], events)
            if self._call.started and self.num_calls == self._call.index:
                self.num_calls += 1
                self._lead = ""
            if step is Step.DONE:
                self._after_call()
                return text[at + 1 :]
            if step is Step.BAD:
                return self._broken(self._call, events) + text[at:]
            at += 1
        return ""

    def _after_call(self) -> None:
        closer, opener = self._syntax.closer, self._syntax.opener
        self._unclosed, self._only_calls = bool(closer), True
        self._seek_call("", skip=WHITESPACE + ",;]", markers=(closer, opener) if closer else (opener,))

    def _broken(self, call: OneCall, events: list[Event]) -> str:
        """Broken inside its arguments a call keeps what follows as arguments, as the model wrote it; broken before, it is
        no call; broken after, what follows is content."""
        if call.in_arguments:
            self._held, self._read = "", self._in_raw_arguments
            return ""
        if call.started:
            self._unclosed = bool(self._syntax.closer)
        return self._no_call(call.unshown, events)

    def _in_raw_arguments(self, text: str, events: list[Event]) -> str:
        index = self.num_calls - 1
        closer = self._syntax.closer
        if not closer:
            events.append(CallArguments(index, text))
            return ""
        window = self._held + text
        at = window.find(closer)
        if at >= 0:
            events.append(CallArguments(index, window[:at]))
            self._only_calls = True
            self._enter(closer, "")
            return window[at + len(closer) :]
        shown = len(window) - undecided(window, (closer,))
        events.append(CallArguments(index, window[:shown]))
        self._held = window[shown:]
        return ""
