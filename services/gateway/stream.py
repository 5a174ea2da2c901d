"""What every answer has on the wire, whatever its endpoint: identity, SSE framing, usage. Knows no HTTP and no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.choice import Choice, Piece
from services.gateway.message_delta import MessageDelta, ToolCallDelta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


# json.dumps would make a new one each time.
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump(value: Any) -> str:
    """Compact JSON in readable UTF-8. The three separators that careless clients split lines at stay escaped."""
    text = _compact(value)
    if text.isascii():
        return text
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def event(body: dict[str, Any]) -> bytes:
    """One SSE event. An error event is one too; no DONE follows it: clients must not take the text for complete."""
    return f"data: {dump(body)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """What all chunks of one answer share. model: as the client called it."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Output(Protocol):
    """One answer in the form of its endpoint: SSE events of a stream, or the one body. Events of a choice come in the order
    opening, pieces, finish; then the usage of all; then DONE."""

    def opening(self, index: int) -> bytes: ...

    def piece(self, choice: Choice, piece: Piece) -> bytes: ...

    def finish(self, choice: Choice) -> bytes: ...

    def usage(self, usage: dict[str, Any], extra: dict[str, Any]) -> bytes: ...

    def body(self, gathered: Sequence[Gathered], usage: dict[str, Any], extra: dict[str, Any]) -> bytes: ...


class Gathered:
    """All pieces of one choice, for an answer that is sent as a whole."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        if piece:
            self.pieces.append(piece)

    def piece(self) -> Piece:
        """All of it as one piece."""
        messages = [piece.message for piece in self.pieces]
        message = MessageDelta(
            "".join(message.content for message in messages),
            "".join(message.reasoning for message in messages),
            _whole_calls([call for message in messages for call in message.tool_calls]),
        )
        return Piece(message, [token for piece in self.pieces for token in piece.tokens])


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        known = calls.get(delta.index)
        calls[delta.index] = (
            ToolCallDelta(delta.index, known.id, known.name, known.arguments + delta.arguments) if known else delta
        )
    return tuple(calls[index] for index in sorted(calls))


def usage_body(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """reasoning_tokens: of completion_tokens; None for a model that does not think."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **details,
    }
