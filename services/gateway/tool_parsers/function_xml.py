"""Qwen3-Coder's tool calls: `<tool_call><function=NAME><parameter=KEY>value</parameter> ... </function></tool_call>`.

Values are text, so the tool's schema says what they are in JSON: a string leaves while it comes, anything else when it is whole.
The tag around the function may be missing, as this family likes to leave it out. One line break at each end of a value is
layout. As in the family's own parser a value ends at the next of its tags, whatever that is.
"""

from __future__ import annotations

import json
import re

from services.gateway.events import CallArguments, CallStart, Content, Event, joined
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.call_parser import first_of, undecided
from services.gateway.tool_parsers.json_value import WHITESPACE
from services.gateway.tool_parsers.schema_kinds import argument_json, property_kinds

OPENER, CLOSER = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
VALUE_ENDS = (END_PARAMETER, PARAMETER, END_FUNCTION)
_NAME = re.compile(r"[^<>\n]{1,256}")
_STRING = frozenset({"string"})


class FunctionXmlParser:
    """`push` returns what became certain, `finish` the rest at the end of the text. Works on a window of what is not decided
    yet: each reader takes what it can from its front and says whether it got on."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self.num_calls = 0
        self._window = ""
        self._lead = ""
        self._name = self._key = ""
        self._num_arguments = self._searched = 0
        self._kinds: frozenset[str] = frozenset()
        self._is_string = self._in_string = self._unclosed = self._only_calls = False
        self._read = self._content

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._window += text
        while self._read(events):
            pass
        return joined(events)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        left, self._window = self._window, ""
        if self._read == self._value:
            self._say_value(left, events, ended=False)
        elif self._read == self._raw:
            events.append(self._arguments(left))
        elif self._read == self._parameters:
            events.append(self._arguments(left.strip(WHITESPACE)))
        elif not self._is_layout(left):
            events.append(Content(self._lead + left))
        return joined(events)

    def _is_layout(self, left: str) -> bool:
        """Whitespace or the beginning of a tag, right after a call."""
        text = left.strip(WHITESPACE)
        return self._only_calls and not self._lead and (not text or CLOSER.startswith(text))

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)

    def _content(self, events: list[Event]) -> bool:
        markers = (OPENER, FUNCTION, *((CLOSER,) if self._unclosed else ()))
        found = first_of(self._window, markers)
        if found is None:
            shown = len(self._window) - undecided(self._window, markers)
            self._show(self._window[:shown], events)
            self._window = self._window[shown:]
            return False
        at, marker = found
        content = self._window[:at].rstrip(WHITESPACE)
        self._show(content, events)
        if marker == CLOSER:
            self._unclosed, self._window = False, self._window[at + len(CLOSER) :]
            return True
        self._lead = self._window[len(content) : at]
        self._window, self._read = self._window[at:], self._opening
        return True

    def _show(self, content: str, events: list[Event]) -> None:
        self._only_calls = self._only_calls and not content
        events.append(Content(content))

    def _no_call(self, taken: int, events: list[Event]) -> bool:
        """The first `taken` characters cannot begin a call: they are content, and what follows is read as such."""
        self._show(self._lead + self._window[:taken], events)
        self._lead, self._window, self._read = "", self._window[taken:], self._content
        return True

    def _opening(self, events: list[Event]) -> bool:
        """From the tag to what follows the function's name."""
        start = len(OPENER) if self._window.startswith(OPENER) else 0
        rest = self._window[start:].lstrip(WHITESPACE) if start else self._window
        if len(rest) < len(FUNCTION) and FUNCTION.startswith(rest):
            return False
        if not rest.startswith(FUNCTION):
            return self._no_call(len(OPENER), events)
        name, closed, after = rest[len(FUNCTION) :].partition(">")
        if name and not _NAME.fullmatch(name):
            return self._no_call(len(self._window) - len(rest) + len(FUNCTION), events)
        tag = after.lstrip(WHITESPACE)
        if not closed or (
            len(tag) < len(PARAMETER) and any(each.startswith(tag) for each in (PARAMETER, END_FUNCTION))
        ):
            return False
        if not tag.startswith((PARAMETER, END_FUNCTION)) or not self._rules.well_formed(name):
            return self._no_call(len(self._window) - len(rest) + len(FUNCTION), events)
        events.append(CallStart(self.num_calls, self._rules.new_id(), name))
        self.num_calls += 1
        self._unclosed = self._unclosed or bool(start)
        self._name, self._num_arguments, self._lead = name, 0, ""
        self._window, self._read = tag, self._parameters
        return True

    def _parameters(self, events: list[Event]) -> bool:
        """Between values."""
        tag = self._window.lstrip(WHITESPACE)
        if tag.startswith(END_FUNCTION):
            events.append(self._arguments("}" if self._num_arguments else "{}"))
            self._only_calls, self._window, self._read = True, tag[len(END_FUNCTION) :], self._after_call
            return True
        if tag.startswith(PARAMETER):
            key, closed, after = tag[len(PARAMETER) :].partition(">")
            if closed and _NAME.fullmatch(key):
                self._begin_value(key, after, events)
                return True
            if not closed and (not key or _NAME.fullmatch(key)):
                return False
        elif any(each.startswith(tag) for each in (PARAMETER, END_FUNCTION)):
            return False
        self._read = self._raw
        return True

    def _begin_value(self, key: str, after: str, events: list[Event]) -> None:
        before = ", " if self._num_arguments else "{"
        events.append(self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: "))
        self._num_arguments += 1
        self._kinds = property_kinds(self._rules.schemas.get(self._name), key)
        self._is_string, self._in_string = self._kinds == _STRING, False
        self._searched = 0
        self._window, self._read = after, self._value

    def _value(self, events: list[Event]) -> bool:
        found = first_of(self._window, VALUE_ENDS, max(0, self._searched - len(END_PARAMETER)))
        self._searched = len(self._window)
        if found is not None:
            at, marker = found
            self._say_value(self._window[:at], events, ended=True)
            at += len(marker) if marker == END_PARAMETER else 0
            self._window, self._read = self._window[at:], self._parameters
            return True
        if self._is_string:
            shown = len(self._window) - _undecided_end(self._window)
            if shown:
                self._say_string(self._window[:shown], events)
                self._window, self._searched = self._window[shown:], 0
        return False

    def _say_string(self, text: str, events: list[Event], *, ended: bool = False) -> None:
        if not self._in_string:
            self._in_string = True
            text = text.removeprefix("\n")
            events.append(self._arguments('"'))
        text = text.removesuffix("\n") if ended else text
        events.append(self._arguments(json.dumps(text, ensure_ascii=False)[1:-1]))

    def _say_value(self, text: str, events: list[Event], *, ended: bool) -> None:
        if self._is_string:
            self._say_string(text, events, ended=ended)
            events.append(self._arguments('"' if ended else ""))
        elif ended:
            events.append(self._arguments(argument_json(text.removeprefix("\n").removesuffix("\n"), self._kinds)))
        else:
            events.append(self._arguments(text.removeprefix("\n")))

    def _after_call(self, events: list[Event]) -> bool:
        """Closing tags and calls that follow at once; all else is content."""
        tag = self._window.lstrip(WHITESPACE)
        if tag.startswith(CLOSER):
            self._unclosed, self._window = False, tag[len(CLOSER) :]
            return True
        if tag.startswith((OPENER, FUNCTION)):
            self._window, self._read = tag, self._opening
            return True
        if any(each.startswith(tag) for each in (CLOSER, OPENER, FUNCTION)):
            return False
        self._read = self._content
        return True

    def _raw(self, events: list[Event]) -> bool:
        """A call that broke between its values: what follows is its arguments as the model wrote them."""
        found = first_of(self._window, (CLOSER,))
        if found is None:
            shown = len(self._window) - undecided(self._window, (CLOSER,), space="")
            events.append(self._arguments(self._window[:shown]))
            self._window = self._window[shown:]
            return False
        events.append(self._arguments(self._window[: found[0]]))
        self._only_calls, self._window, self._read = True, self._window[found[0] :], self._after_call
        return True


def _undecided_end(window: str) -> int:
    """Length of the end of a value's text that may be its last line break and the beginning of a tag."""
    length = undecided(window, VALUE_ENDS, space="")
    return length + (window[: len(window) - length].endswith("\n"))
