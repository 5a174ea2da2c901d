"""Reads one Python literal as it is written and says it in JSON as it goes: strings, numbers, True, False, None, lists, dicts.

Strings leave character by character, numbers and names when they are whole. Owns the syntax of literals and nothing else; no
recursion, no evaluation of anything but a number. `true`, `false` and `null` are taken too, since models mix the two.
"""

from __future__ import annotations

import ast
import json
import math
import re

from services.gateway.tool_parsers.json_value import WHITESPACE, Step

_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "\\": "\\", "'": "'", '"': '"', "\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_OCTAL = "01234567"
_NUMBER = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][+-]?[0-9_]+)?|"
    r"\.[0-9][0-9_]*(?:[eE][+-]?[0-9_]+)?)"
)


class PythonValue:
    """Begins at the value's first character: leading whitespace is the caller's. `json` grows by what each `feed` made
    certain; `unsaid` is what was read and is not in it yet."""

    def __init__(self) -> None:
        self.json: list[str] = []
        self.unsaid = ""
        self._open: list[str] = []
        self._state = self._value
        self._quote = ""
        self._num_quotes = 0
        self._wanted = 0
        self._separator = ""
        self._is_key = False

    def take(self) -> str:
        """The JSON text made since the last time."""
        text, self.json = "".join(self.json), []
        return text

    def feed(self, char: str) -> Step:
        """What `char` is to the value so far, as `JsonValue.feed`; AFTER also for what follows an empty string or a name."""
        return self._state(char)

    def _value(self, char: str) -> Step:
        if char in WHITESPACE and self._open:
            return Step.MORE
        if self._open and char == ("}" if self._open[-1] == "{" else "]"):
            return self._close(char)
        self._is_key = bool(self._open) and self._open[-1] == "{"
        return self._begin(char)

    def _dict_value(self, char: str) -> Step:
        if char in WHITESPACE:
            return Step.MORE
        self._is_key = False
        return self._begin(char)

    def _begin(self, char: str) -> Step:
        if char in "[{" and not self._is_key:
            self._say(char)
            self._open.append(char)
            self._separator, self._state = "", self._value
        elif char in "'\"":
            self._say('"')
            self._quote, self._num_quotes, self._state = char, 1, self._opening
        elif char.isascii() and (char.isalnum() or char in "+-."):
            self.unsaid, self._state = char, self._word
        else:
            return Step.BAD
        return Step.MORE

    def _say(self, text: str) -> None:
        self.json.append(self._separator + text)
        self._separator = ""

    def _word(self, char: str) -> Step:
        """In a number or a name."""
        if char.isascii() and (char.isalnum() or char in "+-._"):
            self.unsaid += char
            return Step.MORE
        said = _NAMES.get(self.unsaid) or _number(self.unsaid)
        if said is None:
            return Step.BAD
        self._say(f'"{said}"' if self._is_key else said)
        self.unsaid = ""
        return self._ended_before(char)

    def _opening(self, char: str) -> Step:
        """After the quotes a string begins with: one, two, which may be a whole empty string, or three."""
        if char == self._quote:
            self._num_quotes += 1
            self._state = self._long if self._num_quotes == 3 else self._opening
            if self._num_quotes == 3:
                self._num_quotes = 0
            return Step.MORE
        if self._num_quotes == 2:
            self.json.append('"')
            return self._ended_before(char)
        self._state = self._string
        return self._string(char)

    def _string(self, char: str) -> Step:
        if char == self._quote:
            self.json.append('"')
            return self._ended()
        return self._character(char)

    def _long(self, char: str) -> Step:
        """In a string that three quotes end."""
        if char != self._quote:
            self.json += [_said(self._quote)] * self._num_quotes
            self._num_quotes = 0
            return self._character(char)
        self._num_quotes += 1
        if self._num_quotes < 3:
            return Step.MORE
        self.json.append('"')
        return self._ended()

    def _character(self, char: str) -> Step:
        if char == "\\":
            self._resume, self.unsaid, self._state = self._state, char, self._escape
        else:
            self.json.append(_said(char))
        return Step.MORE

    def _escape(self, char: str) -> Step:
        if char in _NUM_HEX:
            self._wanted, self._state = _NUM_HEX[char], self._hex
            self.unsaid += char
        elif char in _OCTAL:
            self.unsaid, self._state = self.unsaid + char, self._octal
        else:
            self._say_character(_ESCAPES.get(char, "\\" + char))
        return Step.MORE

    def _hex(self, char: str) -> Step:
        if not (char.isascii() and char.isalnum() and char.lower() in "0123456789abcdef"):
            return Step.BAD
        self.unsaid += char
        digits = self.unsaid[2:]
        if len(digits) == self._wanted:
            if int(digits, 16) > 0x10FFFF:
                self.unsaid = self.unsaid[:-1]
                return Step.BAD
            self._say_character(chr(int(digits, 16)))
        return Step.MORE

    def _octal(self, char: str) -> Step:
        if char in _OCTAL and len(self.unsaid) < 4:
            self.unsaid += char
            return Step.MORE
        self._say_character(chr(int(self.unsaid[1:], 8)))
        return self._state(char)

    def _say_character(self, text: str) -> None:
        self.json += map(_said, text)
        self.unsaid, self._state = "", self._resume

    def _colon(self, char: str) -> Step:
        if char == ":":
            self.json.append(": ")
            self._state = self._dict_value
            return Step.MORE
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _next(self, char: str) -> Step:
        """After a value in a list or a dict."""
        if char == ",":
            self._separator, self._state = ", ", self._value
            return Step.MORE
        if char == ("}" if self._open[-1] == "{" else "]"):
            return self._close(char)
        return Step.MORE if char in WHITESPACE else Step.BAD

    def _close(self, char: str) -> Step:
        """Also after a last comma, which Python allows."""
        self._open.pop()
        self._separator = ""
        self.json.append(char)
        self._is_key = False
        return self._ended()

    def _ended(self) -> Step:
        """With this character."""
        self._state = self._colon if self._is_key else self._next
        return Step.MORE if self._open else Step.DONE

    def _ended_before(self, char: str) -> Step:
        if not self._open:
            return Step.AFTER
        self._state = self._colon if self._is_key else self._next
        return self._state(char)


def _said(char: str) -> str:
    """A character inside a JSON string; half of a surrogate pair as an escape, since UTF-8 cannot say it."""
    return json.dumps(char, ensure_ascii="\ud800" <= char <= "\udfff")[1:-1]


def _number(text: str) -> str | None:
    """Python's number in JSON; None when it is none, or none that JSON has."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value) if math.isfinite(value) else None
    except (ValueError, SyntaxError, OverflowError):
        return None
