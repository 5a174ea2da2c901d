"""Splits a thinking model's text into what it thought and what it answers.

A thought stands at the beginning, between `<think>` and `</think>`; some chat templates write the opening tag into the
prompt, so that the answer begins inside. Tags anywhere else are content. Whitespace around the tags belongs to neither
side. Fed with text cut anywhere; the result depends on the text alone.
"""

from __future__ import annotations

import re

from services.gateway.events import Content, Event, Reasoning

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"
_OPENED = re.compile(rf"{OPEN}\s*\Z")


def opened_by(prompt: str) -> bool:
    """The rendered prompt ends inside a thought."""
    return bool(_OPENED.search(prompt[-64:]))


class ReasoningSplitter:
    """`push` returns what became certain, `finish` the rest at the end of the text."""

    def __init__(self, *, opened: bool) -> None:
        self._held = ""
        self._read = self._at_start
        self._opened = opened
        self._num_read = 0
        self._num_thought: int | None = None

    @property
    def in_thought(self) -> bool:
        """What comes next is not known to be content."""
        return self._read == self._in_thought or (self._read == self._at_start and self._opened)

    @property
    def num_thought(self) -> int | None:
        """Characters of the text up to the thought's end, tags included; 0 where there is no thought, None while it is not
        known to have ended."""
        return self._num_thought

    def push(self, text: str) -> list[Event]:
        """Pieces of reasoning, then of content; none of them is empty."""
        self._num_read += len(text)
        if self._read == self._in_content:
            return [Content(text)] if text else []
        self._held += text
        return self._read()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._read == self._in_thought and held.strip(_SPACE):
            return [Reasoning(held)]
        if self._read == self._at_start and self._opened:
            return [Reasoning(held.lstrip(_SPACE))] if held.strip(_SPACE) else []
        if self._read == self._at_start:
            self._num_thought = 0
        return [Content(held)] if self._read == self._at_start and held else []

    def _at_start(self) -> list[Event]:
        """Before the first character that is no whitespace, or inside the opening tag."""
        text = self._held.lstrip(_SPACE)
        if not text or (OPEN.startswith(text) and text != OPEN):
            return []
        if text.startswith(OPEN):
            self._held, self._read = text[len(OPEN) :], self._before_thought
        elif self._opened:
            self._held, self._read = text, self._in_thought
        else:
            self._num_thought, self._read = 0, self._in_content
            return self._take()
        return self._read()

    def _before_thought(self) -> list[Event]:
        self._held = self._held.lstrip(_SPACE)
        if not self._held:
            return []
        self._read = self._in_thought
        return self._read()

    def _in_thought(self) -> list[Event]:
        at = self._held.find(CLOSE)
        if at < 0:
            shown = _certain(self._held)
            thought, self._held = self._held[:shown], self._held[shown:]
            return [Reasoning(thought)] if thought else []
        thought = self._held[:at].rstrip(_SPACE)
        self._held, self._read = self._held[at + len(CLOSE) :], self._before_content
        self._num_thought = self._num_read - len(self._held)
        return ([Reasoning(thought)] if thought else []) + self._read()

    def _before_content(self) -> list[Event]:
        self._held = self._held.lstrip(_SPACE)
        if not self._held:
            return []
        self._read = self._in_content
        return self._take()

    def _in_content(self) -> list[Event]:
        return self._take()

    def _take(self) -> list[Event]:
        text, self._held = self._held, ""
        return [Content(text)]


def _certain(text: str) -> int:
    """Length of `text` without its end that may be whitespace and the beginning of the closing tag."""
    for length in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-length:]):
            return len(text[:-length].rstrip(_SPACE))
    return len(text.rstrip(_SPACE))
