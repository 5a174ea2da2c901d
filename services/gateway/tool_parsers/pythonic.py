"""Tool calls as a Python list, `[f(a=1, b="x"), g()]`, as Llama 3.2 and 4 can write them: bare at the beginning of the answer,
or anywhere after `<|python_start|>`. Arguments leave as JSON while they come.

A call is announced with its first keyword; before that, and where the name is not of a declared tool, the text is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.gateway.events import CallArguments, CallStart, Content, Event, joined
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.call_parser import undecided
from services.gateway.tool_parsers.json_value import WHITESPACE, Step
from services.gateway.tool_parsers.python_value import PythonValue

OPENER, CLOSER = "<|python_start|>", "<|python_end|>"
_NAME_CHAR = re.compile(r"[A-Za-z0-9_.-]")
_KEY_CHAR = re.compile(r"[\w.-]")
_LONGEST_NAME = 64
# What a state makes of a character: True when it was taken.
_State = Callable[[str, list[Event]], bool]


class PythonicParser:
    """`push` returns what became certain, `finish` the rest at the end of the text."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self.num_calls = 0
        self._held = ""
        self._word = self._key = ""
        self._started = self._after_calls = False
        self._value = PythonValue()
        self._state: _State = self._before_list
        self._in_content = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._content(text, events) if self._in_content else self._call_text(text, events)
        return joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._in_call:
            events += [self._arguments(self._value.unsaid), self._arguments(self._held.strip(WHITESPACE))]
        elif not (self._after_calls and self._is_layout(self._held)):
            events.append(Content(self._held))
        self._held = ""
        return joined(events)

    @property
    def _in_call(self) -> bool:
        """Between a call's first keyword and its closing parenthesis: what cannot be read is arguments."""
        return self._started and not self._in_content

    def _is_layout(self, held: str) -> bool:
        left = held.strip(WHITESPACE + ",]")
        return not left or CLOSER.startswith(left)

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)

    def _content(self, text: str, events: list[Event]) -> str:
        window, self._held = self._held + text, ""
        at = window.find(OPENER)
        if at < 0:
            shown = len(window) - undecided(window, (OPENER,))
            events.append(Content(window[:shown]))
            self._held = window[shown:]
            return ""
        content = window[:at].rstrip(WHITESPACE)
        events.append(Content(content))
        self._seek(window[len(content) : at + len(OPENER)])
        return window[at + len(OPENER) :]

    def _seek(self, lead: str) -> None:
        self._held, self._state = lead, self._list
        self._in_content = self._after_calls = False

    def _call_text(self, text: str, events: list[Event]) -> str:
        for index, char in enumerate(text):
            if not self._state(char, events):
                return self._refused(char, events) + text[index + 1 :]
            if self._in_content:
                return text[index + 1 :]
        return ""

    def _refused(self, char: str, events: list[Event]) -> str:
        """The character cannot follow: inside a call all that comes is its arguments, elsewhere it is content."""
        if self._in_call:
            events += [self._arguments(self._value.unsaid), self._arguments(self._held)]
            self._value, self._held, self._state = PythonValue(), "", self._raw
            return char
        unread, self._held, self._in_content, self._after_calls = self._held + char, "", True, False
        # A tag that turned out to open nothing must not be found again.
        before, tag, after = unread.partition(OPENER)
        events.append(Content(before + tag if tag else ""))
        return after if tag else unread

    def _raw(self, char: str, events: list[Event]) -> bool:
        events.append(self._arguments(char))
        return True

    def _before_list(self, char: str, events: list[Event]) -> bool:
        """At the beginning of the answer: whitespace, the tag or the list."""
        tag = (self._held + char).lstrip(WHITESPACE)
        if not OPENER.startswith(tag):
            return tag == char and self._list(char, events)
        self._held += char
        if tag == OPENER:
            self._seek(self._held)
        return True

    def _list(self, char: str, events: list[Event]) -> bool:
        if char == "[":
            self._state, self._word = self._name, ""
        elif char not in WHITESPACE:
            return False
        self._held += char
        return True

    def _name(self, char: str, events: list[Event]) -> bool:
        if char == "(" and self._rules.allows(self._word):
            self._state, self._key = self._keyword, ""
        elif _NAME_CHAR.match(char) and len(self._word) < _LONGEST_NAME:
            self._word += char
        elif self._word or char not in WHITESPACE:
            return False
        self._held += char
        return True

    def _keyword(self, char: str, events: list[Event]) -> bool:
        """Before or in the name of an argument; a comma after the last one is allowed."""
        if char == ")" and not self._key:
            self._end_call(events)
            return True
        if _KEY_CHAR.match(char) and not (char.isdigit() and not self._key) and not self._key.endswith(" "):
            self._key += char
        elif char in WHITESPACE:
            self._key += " " if self._key and not self._key.endswith(" ") else ""
        elif char == "=" and self._key:
            self._begin_argument(events)
            return True
        else:
            return False
        self._held += char
        return True

    def _begin_argument(self, events: list[Event]) -> None:
        before = ", " if self._started else "{"
        self._start(events)
        events.append(self._arguments(f"{before}{json.dumps(self._key.strip(), ensure_ascii=False)}: "))
        self._state, self._value, self._held = self._before_value, PythonValue(), ""

    def _start(self, events: list[Event]) -> None:
        if not self._started:
            self._started = True
            events.append(CallStart(self.num_calls, self._rules.new_id(), self._word))
            self.num_calls += 1

    def _before_value(self, char: str, events: list[Event]) -> bool:
        if char in WHITESPACE:
            return True
        self._state = self._in_value
        return self._in_value(char, events)

    def _in_value(self, char: str, events: list[Event]) -> bool:
        step = self._value.feed(char)
        events.append(self._arguments(self._value.take()))
        if step is Step.DONE:
            self._state = self._after_value
        elif step is Step.AFTER:
            self._state = self._after_value
            return self._after_value(char, events)
        return step is not Step.BAD

    def _after_value(self, char: str, events: list[Event]) -> bool:
        if char == ",":
            self._state, self._key, self._held = self._keyword, "", char
        elif char == ")":
            self._end_call(events)
        elif char not in WHITESPACE:
            return False
        return True

    def _end_call(self, events: list[Event]) -> None:
        empty = not self._started
        self._start(events)
        events.append(self._arguments("{}" if empty else "}"))
        self._started, self._after_calls, self._held = False, True, ""
        self._state = self._next_call

    def _next_call(self, char: str, events: list[Event]) -> bool:
        if char == ",":
            self._state, self._word = self._name, ""
        elif char == "]":
            self._state, self._held = self._after_list, ""
            return True
        elif char not in WHITESPACE:
            return False
        self._held += char
        return True

    def _after_list(self, char: str, events: list[Event]) -> bool:
        """Whitespace, the closing tag, another tag or list; all else is content."""
        tag = (self._held + char).lstrip(WHITESPACE)
        if char == "[" and tag == "[":
            return self._list(char, events)
        if not (CLOSER.startswith(tag) or OPENER.startswith(tag)):
            return False
        self._held += char
        if tag == OPENER:
            self._seek(self._held)
        elif tag == CLOSER:
            self._held = ""
        return True
