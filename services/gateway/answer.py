"""One chat completion from the first delta to the last byte: deltas to text, text to SSE events or one JSON body.

Every ending is handled here: the model's own, a stop string, a failure before or inside the answer, a client that went.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.errors import Cancelled, InternalFault, ServingError
from scheduler.wire import Delta, FinishReason, Request, SamplingParams, Usage
from services.gateway.config import GatewayConfig
from services.gateway.engine import Completion, EngineClient
from services.gateway.errors import answer_to, error_body, error_response, outcome_of
from services.gateway.openai import ChatRequest
from services.gateway.stream import (
    DONE,
    KEEP_ALIVE,
    ChunkWriter,
    Identity,
    RoundLog,
    error_event,
    unary_body,
    usage_body,
)
from services.gateway.text import OutputText, Tokenizer
from services.metrics import GatewayMetrics
from services.model_card import ModelCard

logger = logging.getLogger(__name__)

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_LAST_DELTA_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request, ready to run."""

    request: Request
    chat: ChatRequest
    card: ModelCard
    tokenizer: Tokenizer
    arrived_s: float

    @property
    def identity(self) -> Identity:
        return Identity(self.request.request_id, int(time.time()), self.card.name, self.card.fingerprint)


class Answer:
    """The state of one answer: its text, its counts, how it ended."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: Sequence[str]) -> None:
        self._text = OutputText(tokenizer, stops)
        self._stop_ids = frozenset(params.stop_ids)
        self.rounds = RoundLog()
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def push(self, delta: Delta) -> str:
        """The text this delta makes certain; sets `finish_reason` when it is the end."""
        before = self._text.num_tokens
        hidden = self._ends_with_stop_id(delta)
        shown = self._text.push(delta.token_ids[: len(delta.token_ids) - hidden])
        if not self._text.stopped:
            self._text.count_hidden(hidden)
            if delta.finish_reason is not None:
                shown += self._text.finish()
                self.finish_reason = delta.finish_reason.value
        if self._text.stopped:
            self.finish_reason = FinishReason.STOP.value
        self.rounds.add(delta, self._text.num_tokens - before)
        self.usage = delta.usage or self.usage
        return shown

    def _ends_with_stop_id(self, delta: Delta) -> int:
        ended = delta.finish_reason is FinishReason.STOP and delta.token_ids
        return int(bool(ended) and delta.token_ids[-1] in self._stop_ids)


class ChatResponse(Response):
    """Runs the job when the server asks for the response, so that no await lies between the engine's request and the
    code that ends it."""

    def __init__(self, job: Job, client: EngineClient, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        super().__init__()
        self._job, self._client, self._config, self._metrics = job, client, config, metrics
        self._answer = Answer(job.tokenizer, job.request.params, job.chat.stops)
        self._sent_headers = False
        self._first_s = self._last_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, status = "cancelled", 499
        try:
            outcome, status = await until_disconnect(receive, self._run(scope, receive, send))
        except Cancelled:
            logger.debug("client of %s went away", self._job.request.request_id)
        finally:
            self._record(outcome, status)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        """Returns how it ended, for the metrics: (outcome, HTTP status)."""
        try:
            async with self._client.open(self._job.request) as completion:
                await (self._stream if self._job.chat.stream else self._unary)(completion, send)
            return self._answer.finish_reason or "stop", 200
        except ServingError as error:
            return await self._fail(error, scope, receive, send)
        except OSError:
            raise Cancelled("the client closed the connection") from None
        except Exception:
            logger.exception("answering %s failed", self._job.request.request_id)
            return await self._fail(InternalFault("internal error"), scope, receive, send)

    async def _fail(self, error: ServingError, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        if self._sent_headers:
            await _send_body(send, error_event(error_body(error)), more=False)
        else:
            await error_response(error, started=self._answer.num_tokens > 0)(scope, receive, send)
        return self._metrics.failed(outcome_of(error), answer_to(error).code), answer_to(error).status

    async def _unary(self, completion: Completion, send: Send) -> None:
        texts: list[str] = []
        while self._answer.finish_reason is None:
            texts += self._push(await completion.take())
        await self._settle(completion)
        body = unary_body(
            self._job.identity, "".join(texts), self._answer.finish_reason, self._usage(), self._speculation()
        )
        await _send_head(send, "application/json", {"content-length": str(len(body))})
        self._sent_headers = True
        await _send_body(send, body, more=False)

    async def _stream(self, completion: Completion, send: Send) -> None:
        """The first wait ends before the headers, so that an early failure still has its own status."""
        writer = ChunkWriter(self._job.identity, include_usage=self._job.chat.include_usage)
        deltas = await completion.take(self._config.keepalive_s)
        await _send_head(send, "text/event-stream; charset=utf-8", _SSE_HEADERS)
        self._sent_headers = True
        opening = writer.role()
        while True:
            events = b"".join(writer.content(text) for text in self._push(deltas) if text)
            if self._answer.finish_reason is not None:
                break
            if opening or events or not deltas:
                await _send_body(send, opening + events or KEEP_ALIVE)
            opening = b""
            deltas = await completion.take(self._config.keepalive_s)
        completion.cancel()
        await _send_body(send, opening + events + writer.finish(self._answer.finish_reason))
        await _send_body(send, await self._ending(completion, writer), more=False)

    async def _ending(self, completion: Completion, writer: ChunkWriter) -> bytes:
        if not self._job.chat.include_usage:
            return DONE
        await self._settle(completion)
        return writer.usage(self._usage(), self._speculation()) + DONE

    def _push(self, deltas: Sequence[Delta]) -> list[str]:
        texts = []
        for delta in deltas:
            if self._answer.finish_reason is None:
                texts.append(self._answer.push(delta))
        self._tick()
        return texts

    def _tick(self) -> None:
        if self._answer.num_tokens:
            self._last_s = time.monotonic()
            if not self._first_s:
                self._first_s = self._last_s
                self._metrics.first_token(self._first_s - self._job.arrived_s)

    async def _settle(self, completion: Completion) -> None:
        """After a stop string the engine still has to say what the prefix cache gave; it is asked to stop and waited
        for, a moment."""
        completion.cancel()
        deadline = time.monotonic() + _LAST_DELTA_TIMEOUT_S
        with contextlib.suppress(ServingError):
            while self._answer.usage is None and (left := deadline - time.monotonic()) > 0:
                deltas = await completion.take(left)
                self._answer.usage = next((d.usage for d in deltas if d.usage is not None), None)

    def _usage(self) -> dict[str, Any]:
        cached = self._answer.usage.cached_tokens if self._answer.usage is not None else 0
        return usage_body(len(self._job.request.prompt_ids), self._answer.num_tokens, cached)

    def _speculation(self) -> dict[str, Any] | None:
        level = self._config.speculation_metrics
        if level == "off":
            return None
        return self._answer.rounds.body(self._job.card.draft_width, detailed=level == "detailed")

    def _record(self, outcome: str, status: int) -> None:
        self._metrics.request_ended(outcome, status, time.monotonic() - self._job.arrived_s)
        num_later = self._answer.num_tokens - 1
        if num_later > 0 and self._last_s > self._first_s:
            self._metrics.time_per_output_token((self._last_s - self._first_s) / num_later)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, tuple[str, int]]) -> tuple[str, int]:
    """The result of `work`, which is cancelled and awaited when the client goes first; raises Cancelled then."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_head(send: Send, content_type: str, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in {"content-type": content_type, **headers}.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
