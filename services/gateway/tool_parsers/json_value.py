"""Recognises one JSON value in text that arrives character by character, without building the value.

Owns the syntax of RFC 8259 and nothing else. No recursion: a value may be nested as deep as a model likes.
"""

from __future__ import annotations

import re
from enum import Enum

WHITESPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = '"\\/bfnrtu'
_HEX = "0123456789abcdefABCDEF"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
# number automaton: state -> characters -> next state; the states in which a number may end
_NUMBER: dict[str, dict[str, str]] = {
    "sign": {"0": "zero", "123456789": "int"},
    "zero": {".": "point", "eE": "e"},
    "int": {"0123456789": "int", ".": "point", "eE": "e"},
    "point": {"0123456789": "frac"},
    "frac": {"0123456789": "frac", "eE": "e"},
    "e": {"+-": "esign", "0123456789": "exp"},
    "esign": {"0123456789": "exp"},
    "exp": {"0123456789": "exp"},
}
_NUMBER_ENDS = ("zero", "int", "frac", "exp")


class Step(Enum):
    """MORE: the character belongs to the value. DONE: it is the value's last one. AFTER: the value had ended before it
    (numbers). BAD: no JSON value goes on like this."""

    MORE = 1
    DONE = 2
    AFTER = 3
    BAD = 4


class JsonValue:
    """Begins at the value's first character: leading whitespace is the caller's."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._state = "value"
        self._left = ""

    def feed(self, char: str) -> Step:
        """What `char` is to the value so far. Not to be called again after anything but MORE."""
        return _STATES[self._state](self, char)

    def plain_until(self, text: str, start: int) -> int:
        """Where the characters of `text` from `start` on end that are plain ones of a string: all of them are MORE, and
        need not be fed one by one. `start` itself outside of a string."""
        match = _PLAIN.match(text, start) if self._state in ("string", "key_string") else None
        return match.end() if match else start

    def _value(self, char: str) -> Step:
        if char in WHITESPACE and self._open:
            return Step.MORE
        if char in "{[":
            self._open.append(char)
            self._state = "first_key" if char == "{" else "first_item"
        elif char == '"':
            self._state = "string"
        elif char in _LITERALS:
            self._state, self._left = "literal", _LITERALS[char][1:]
        elif char == "-" or (char.isascii() and char.isdigit()):
            self._state, self._left = "number", "sign" if char == "-" else "zero" if char == "0" else "int"
        else:
            return Step.BAD
        return Step.MORE

    def _first_item(self, char: str) -> Step:
        return self._close() if char == "]" else self._value(char)

    def _first_key(self, char: str) -> Step:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> Step:
        if char == '"':
            self._state = "key_string"
            return Step.MORE
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _colon(self, char: str) -> Step:
        if char == ":":
            self._state = "value"
            return Step.MORE
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _next(self, char: str) -> Step:
        """After a member or item of the innermost open container."""
        kind = self._open[-1]
        if char == ",":
            self._state = "key" if kind == "{" else "value"
            return Step.MORE
        if char == ("}" if kind == "{" else "]"):
            return self._close()
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _close(self) -> Step:
        self._open.pop()
        return self._ended()

    def _ended(self) -> Step:
        self._state = "next"
        return Step.MORE if self._open else Step.DONE

    def _string(self, char: str) -> Step:
        if char == '"':
            if self._state == "key_string":
                self._state = "colon"
                return Step.MORE
            return self._ended()
        if char == "\\":
            self._state += "_escape"
            return Step.MORE
        return Step.MORE if char >= " " else Step.BAD

    def _escape(self, char: str) -> Step:
        if char not in _ESCAPES:
            return Step.BAD
        string = self._state.removesuffix("_escape")
        self._state, self._left = (string + "_hex", "....") if char == "u" else (string, "")
        return Step.MORE

    def _hex(self, char: str) -> Step:
        if char not in _HEX:
            return Step.BAD
        self._left = self._left[1:]
        if not self._left:
            self._state = self._state.removesuffix("_hex")
        return Step.MORE

    def _literal(self, char: str) -> Step:
        if char != self._left[0]:
            return Step.BAD
        self._left = self._left[1:]
        return Step.MORE if self._left else self._ended()

    def _number(self, char: str) -> Step:
        for characters, state in _NUMBER[self._left].items():
            if char in characters:
                self._left = state
                return Step.MORE
        if self._left not in _NUMBER_ENDS:
            return Step.BAD
        if not self._open:
            return Step.AFTER
        self._state = "next"
        return self._next(char)


_STATES = {
    "value": JsonValue._value,
    "first_item": JsonValue._first_item,
    "first_key": JsonValue._first_key,
    "key": JsonValue._key,
    "colon": JsonValue._colon,
    "next": JsonValue._next,
    "string": JsonValue._string,
    "key_string": JsonValue._string,
    "string_escape": JsonValue._escape,
    "key_string_escape": JsonValue._escape,
    "string_hex": JsonValue._hex,
    "key_string_hex": JsonValue._hex,
    "literal": JsonValue._literal,
    "number": JsonValue._number,
}
