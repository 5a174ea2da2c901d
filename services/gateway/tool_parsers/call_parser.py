"""What every parser of tool calls is to the rest: text in, cut anywhere; content and calls out."""

from __future__ import annotations

from typing import Protocol

from services.gateway.events import Event
from services.gateway.tool_parsers.json_value import WHITESPACE


class CallParser(Protocol):
    """`push` returns what became certain, `finish` the rest at the end of the text. num_calls: begun so far."""

    num_calls: int

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def undecided(window: str, markers: tuple[str, ...], *, space: str = WHITESPACE) -> int:
    """Length of the end of `window` that may yet belong to a tag: whitespace, then a tag's beginning."""
    longest = max(len(marker) for marker in markers) - 1
    for length in range(min(longest, len(window)), -1, -1):
        tail = window[len(window) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return len(window) - len(window[: len(window) - length].rstrip(space))
    return 0


def first_of(window: str, markers: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Where the first of the tags begins at `start` or later, and which it is."""
    return min(((at, marker) for marker in markers if (at := window.find(marker, start)) >= 0), default=None)
