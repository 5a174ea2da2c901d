"""One choice of an answer, from committed tokens to what they add to its message:

    tokens -> text -> stop strings -> MessageParser (reasoning, tool calls) -> MessageDelta

Counts what the client is charged for: tokens, their logprobs and the usage end together, also inside a block. Knows no HTTP
and no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.wire import Delta, FinishReason, SamplingParams, TokenLogprob, Usage
from services.gateway.message_delta import NOTHING, MessageDelta, MessageParser
from services.gateway.rounds import RoundLog
from services.gateway.text import OutputText, Tokenizer


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose logprob the client wants. offset: of its text in the choice's text, in characters. drafted: it came from
    the drafter and was accepted."""

    token_id: int
    logprob: TokenLogprob
    offset: int
    drafted: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta adds: to the message, and the tokens behind it when logprobs are wanted."""

    message: MessageDelta
    tokens: Sequence[ShownToken] = ()

    def __bool__(self) -> bool:
        return bool(self.message or self.tokens)


class Choice:
    """The state of one choice: its text, its counts, how it ended (`finish_reason`, None while it runs).

    shown_ids: special tokens whose text the parser wants to see; the others are no text. may_think: the answer may begin
    with a thought, whose tokens are counted.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: Sequence[str],
        parser: MessageParser,
        *,
        shown_ids: frozenset[int] = frozenset(),
        may_think: bool = False,
    ) -> None:
        self.index = index
        self.rounds = RoundLog()
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.first_s = self.last_s = 0.0
        self._num_reasoning: int | None = None if may_think else 0
        self._text = OutputText(
            tokenizer, stops, num_unsearched=params.min_tokens, shown_ids=shown_ids, keeps_starts=may_think
        )
        self._parser = parser
        self._stop_ids = frozenset(params.stop_ids)
        self._wants_logprobs = params.num_logprobs is not None
        self._held: list[ShownToken] = []

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought, its tags included: those that begin before its last character. All of them while it lasts."""
        return self.num_tokens if self._num_reasoning is None else self._num_reasoning

    @property
    def num_chars(self) -> int:
        """Characters of text given out, before the parser took it apart."""
        return self._text.num_shown

    def push(self, delta: Delta) -> Piece:
        """What this delta makes certain; sets `finish_reason` when it is the end. Tokens stay with the text they are
        part of: those of held-back text come with the next piece that has some, or with the last."""
        before = self.num_tokens
        shown = self._push_tokens(delta)
        if not self._text.stopped and delta.finish_reason is not None:
            shown += self._text.finish()
            self.finish_reason = delta.finish_reason.value
        if self._text.stopped:
            self.finish_reason = FinishReason.STOP.value
        self.rounds.add(delta, self.num_tokens - before)
        self.usage = delta.usage or self.usage
        message = self._parse(shown)
        return Piece(message, self._take_held() if message or self.finish_reason is not None else ())

    def _push_tokens(self, delta: Delta) -> str:
        if not self._wants_logprobs:
            num_text = len(delta.token_ids) - self._ends_with_stop_id(delta)
            text = self._text.push(delta.token_ids[:num_text])
            if not self._text.stopped:
                self._text.count_hidden(len(delta.token_ids) - num_text)
            return text
        return "".join(self._push_one(delta, at) for at in range(len(delta.token_ids)))

    def _push_one(self, delta: Delta, at: int) -> str:
        if self._text.stopped:
            return ""
        offset, token_id = self._text.num_chars, delta.token_ids[at]
        if at == len(delta.token_ids) - 1 and self._ends_with_stop_id(delta):
            text = ""
            self._text.count_hidden(1)
        else:
            text = self._text.push((token_id,))
        if delta.logprobs is not None:
            self._held.append(ShownToken(token_id, delta.logprobs[at], offset, at < delta.num_accepted))
        return text

    def _ends_with_stop_id(self, delta: Delta) -> int:
        ended = delta.finish_reason is FinishReason.STOP and delta.token_ids
        return int(bool(ended) and delta.token_ids[-1] in self._stop_ids)

    def _parse(self, text: str) -> MessageDelta:
        message = self._parser.push(text) if text else NOTHING
        if self.finish_reason is not None:
            message = _joined(message, self._parser.finish())
            self.finish_reason = self._parser.finish_reason(self.finish_reason)
        if self._text.starts is not None and self._parser.num_thought is not None:
            self._num_reasoning = bisect_left(self._text.starts, self._parser.num_thought)
            self._text.starts = None
        return message

    def _take_held(self) -> Sequence[ShownToken]:
        held, self._held = self._held, []
        return held


def _joined(first: MessageDelta, second: MessageDelta) -> MessageDelta:
    if not first or not second:
        return first or second
    return MessageDelta(
        first.content + second.content, first.reasoning + second.reasoning, first.tool_calls + second.tool_calls
    )
