"""Reads one call, `{"name": ..., "arguments": {...}}`, as it is written, and hands the arguments on while they come.

The call is announced when its arguments begin (or, where they come before the name, when both are there), so that what
turns out to be no call before that can still be shown as the text it is. `parameters` is Llama's word for `arguments`.
Other keys are passed over, or say that this is no call when `only_call_keys`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.events import CallArguments, CallStart, Event
from services.gateway.tool_parsers.json_value import WHITESPACE, JsonValue, Step

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = ("name", "type", "id", *_ARGUMENTS)
_State = Callable[[str, list[Event]], Step]


@dataclass(frozen=True, slots=True)
class CallRules:
    """What counts as a call. names: those that may be called; None is any well-formed one. new_id: a fresh id.
    schemas: of the arguments, by name, for formats that do not say what a value is."""

    new_id: Callable[[], str]
    names: frozenset[str] | None = None
    only_call_keys: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def well_formed(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name))

    def allows(self, name: str) -> bool:
        return self.well_formed(name) and (self.names is None or name in self.names)


class CallObject:
    """Fed from the opening brace on. `unshown`: text read that no event stands for, yet."""

    def __init__(self, index: int, rules: CallRules) -> None:
        self.index, self._rules = index, rules
        self._state: _State = self._first_key
        self._value = JsonValue()
        self._text: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._held: str | None = None
        self._unshown = ["{"]
        self.started = False
        self.in_arguments = False

    @property
    def unshown(self) -> str:
        return "".join(self._unshown)

    def skip_plain(self, text: str, start: int, events: list[Event]) -> int:
        """Takes what is plain text inside a string of the streamed arguments at once; gives where it ends."""
        end = self._value.plain_until(text, start) if self.in_arguments else start
        if end > start:
            events.append(CallArguments(self.index, text[start:end]))
        return end

    def feed(self, char: str, events: list[Event]) -> Step:
        """MORE, DONE with the closing brace, or BAD: this character cannot follow and was not taken."""
        step = self._state(char, events)
        if step is not Step.BAD and not self.in_arguments:
            self._unshown.append(char)
        return step

    def _first_key(self, char: str, events: list[Event]) -> Step:
        return self._close(events) if char == "}" else self._before_key(char, events)

    def _before_key(self, char: str, events: list[Event]) -> Step:
        if char == '"':
            self._begin(char, self._in_key)
            return Step.MORE
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _begin(self, char: str, state: _State) -> Step:
        self._value, self._text, self._state = JsonValue(), [], state
        return self._take(char)

    def _take(self, char: str) -> Step:
        step = self._value.feed(char)
        if step in (Step.MORE, Step.DONE):
            self._text.append(char)
        return step

    def _in_key(self, char: str, events: list[Event]) -> Step:
        step = self._take(char)
        if step is Step.DONE:
            self._key, self._state = json.loads("".join(self._text)), self._colon
            if self._rules.only_call_keys and self._key not in _CALL_KEYS:
                return Step.BAD
        return Step.BAD if step is Step.BAD else Step.MORE

    def _colon(self, char: str, events: list[Event]) -> Step:
        if char == ":":
            self._state = self._before_value
            return Step.MORE
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _before_value(self, char: str, events: list[Event]) -> Step:
        if char in WHITESPACE:
            return Step.MORE
        if char == "{" and self._key in _ARGUMENTS and self._name is not None and not self.started:
            self._start(events)
            self.in_arguments = True
            self._unshown.clear()
            events.append(CallArguments(self.index, char))
            return self._begin(char, self._in_streamed_arguments)
        return self._value_step(self._begin(char, self._in_value), char, events)

    def _in_streamed_arguments(self, char: str, events: list[Event]) -> Step:
        step = self._value.feed(char)
        if step is Step.BAD:
            return Step.BAD
        events.append(CallArguments(self.index, char))
        if step is Step.DONE:
            self._state = self._after_value
        return Step.MORE

    def _in_value(self, char: str, events: list[Event]) -> Step:
        return self._value_step(self._take(char), char, events)

    def _value_step(self, step: Step, char: str, events: list[Event]) -> Step:
        if step in (Step.MORE, Step.BAD):
            return step
        if not self._keep("".join(self._text), events):
            return Step.BAD
        self._state = self._after_value
        return self._after_value(char, events) if step is Step.AFTER else Step.MORE

    def _keep(self, text: str, events: list[Event]) -> bool:
        """A whole value was read; False when it shows that this is no call."""
        if self._key == "name" and self._name is None:
            self._name = json.loads(text) if text.startswith('"') else ""
            return self._rules.allows(self._name)
        if self._key in _ARGUMENTS and self._held is None and not self.started:
            self._held = _arguments(text)
        return True

    def _after_value(self, char: str, events: list[Event]) -> Step:
        self.in_arguments = False
        if char == ",":
            self._state = self._before_key
            return Step.MORE
        if char == "}":
            return self._close(events)
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _close(self, events: list[Event]) -> Step:
        if self._name is None:
            return Step.BAD
        if not self.started:
            self._start(events)
            events.append(CallArguments(self.index, self._held or "{}"))
        return Step.DONE

    def _start(self, events: list[Event]) -> None:
        self.started = True
        events.append(CallStart(self.index, self._rules.new_id(), self._name or ""))


def _arguments(text: str) -> str:
    """Arguments that were not streamed: an object as it is, an object inside a string unpacked, null as none."""
    if text == "null":
        return "{}"
    inner = json.loads(text) if text.startswith('"') else text
    is_text = not any("\ud800" <= char <= "\udfff" for char in inner)
    return inner if inner.lstrip().startswith("{") and is_text else text
