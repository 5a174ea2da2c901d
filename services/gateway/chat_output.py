"""Chat completions on the wire: chunks and the unary body.

Chunks are built by hand: the path of a round's runs thousands of times a second, and all of it but its text is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.choice import Choice, Piece
from services.gateway.logprobs import chat_logprobs
from services.gateway.message_delta import ToolCallDelta
from services.gateway.stream import Gathered, Identity, dump
from services.gateway.text import Tokenizer


class ChatOutput:
    """include_usage: chunks before the last say `usage: null`. logprobs: the client asked for them."""

    def __init__(
        self,
        identity: Identity,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        logprobs: bool = False,
        mark_drafted: bool = False,
    ) -> None:
        self._identity, self._tokenizer = identity, tokenizer
        self._logprobs, self._mark_drafted = logprobs, mark_drafted
        self._head = "data: " + dump(identity.fields("chat.completion.chunk"))[:-1]
        usage = ',"usage":null' if include_usage else ""
        self._end = f"]{usage}}}\n\n"
        self._tail = f'}},"logprobs":null,"finish_reason":null}}{self._end}'

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        message = piece.message
        if not (message.reasoning or message.tool_calls or piece.tokens):
            head = f'{self._head},"choices":[{{"index":{choice.index},"delta":{{"content":'
            return f"{head}{dump(message.content)}{self._tail}".encode()
        delta: dict[str, Any] = {}
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.content or not (message.reasoning or message.tool_calls):
            delta["content"] = message.content
        if message.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in message.tool_calls]
        return self._chunk(choice.index, delta, self._shown_logprobs(piece), None)

    def finish(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, {}, None, choice.finish_reason)

    def usage(self, usage: dict[str, Any], extra: dict[str, Any]) -> bytes:
        return f"{self._head},{dump({'choices': [], 'usage': usage} | extra)[1:]}\n\n".encode()

    def body(self, gathered: Sequence[Gathered], usage: dict[str, Any], extra: dict[str, Any]) -> bytes:
        choices = [self._whole(each) for each in gathered]
        fields = self._identity.fields("chat.completion")
        return dump(fields | {"choices": choices, "usage": usage} | extra).encode()

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return f'{self._head},"choices":[{dump(choice)}{self._end}'.encode()

    def _whole(self, gathered: Gathered) -> dict[str, Any]:
        piece = gathered.piece()
        calls = [_call(call) for call in piece.message.tool_calls]
        message: dict[str, Any] = {"role": "assistant", "content": piece.message.content, "refusal": None}
        if calls:
            message |= {"content": piece.message.content or None, "tool_calls": calls}
        if piece.message.reasoning:
            message["reasoning_content"] = piece.message.reasoning
        return {
            "index": gathered.choice.index,
            "message": message,
            "logprobs": self._shown_logprobs(piece) if self._logprobs else None,
            "finish_reason": gathered.choice.finish_reason,
        }

    def _shown_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return chat_logprobs(piece.tokens, self._tokenizer, mark_drafted=self._mark_drafted)


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}
