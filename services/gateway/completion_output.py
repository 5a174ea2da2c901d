"""Text completions on the wire: chunks and the unary body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.choice import Choice, Piece
from services.gateway.logprobs import completion_logprobs
from services.gateway.stream import Gathered, Identity, dump, event
from services.gateway.text import Tokenizer


class CompletionOutput:
    """include_usage: chunks before the last say `usage: null`. logprobs: the client asked for them."""

    def __init__(
        self, identity: Identity, tokenizer: Tokenizer, *, include_usage: bool = False, logprobs: bool = False
    ) -> None:
        self._identity, self._tokenizer = identity, tokenizer
        self._include_usage, self._logprobs = include_usage, logprobs

    def opening(self, index: int) -> bytes:
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._chunk(self._choice(choice, piece, None))

    def finish(self, choice: Choice) -> bytes:
        ending = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        return self._chunk(ending)

    def usage(self, usage: dict[str, Any], extra: dict[str, Any]) -> bytes:
        return event(self._identity.fields("text_completion") | {"choices": [], "usage": usage} | extra)

    def body(self, gathered: Sequence[Gathered], usage: dict[str, Any], extra: dict[str, Any]) -> bytes:
        choices = [self._choice(each.choice, each.piece(), each.choice.finish_reason) for each in gathered]
        fields = self._identity.fields("text_completion")
        return dump(fields | {"choices": choices, "usage": usage} | extra).encode()

    def _choice(self, choice: Choice, piece: Piece, finish_reason: str | None) -> dict[str, Any]:
        logprobs = completion_logprobs(piece.tokens, self._tokenizer, choice.num_chars) if self._logprobs else None
        text = piece.message.content
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return event(self._identity.fields("text_completion") | {"choices": [choice]} | usage)
