"""What an answer is made of once its text is understood: pieces of reasoning, content and tool calls, in order.

The values between the parsers, which know a model's syntax, and the writers, which know the wire. Know neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The `index`-th tool call of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one event; pieces of no text are gone."""
    found: list[Event] = []
    for _, group in groupby((event for event in events if isinstance(event, CallStart) or event.text), key=_kind):
        events = list(group)
        first = events[0]
        if len(events) > 1 and not isinstance(first, CallStart):
            first = replace(first, text="".join(getattr(event, "text", "") for event in events))
        found.append(first)
    return found


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, CallStart | CallArguments) else -1
