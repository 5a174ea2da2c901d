"""One answer from the first delta to the last byte: deltas to pieces, pieces to SSE events or one JSON body.

Every ending is handled here: the model's own, a stop string, a failure before or inside the answer, a client that went.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.errors import Cancelled, InternalFault, ServingError, TooLong
from scheduler.wire import Delta
from services.gateway.choice import Choice, Piece
from services.gateway.config import GatewayConfig
from services.gateway.errors import ContextTooLong, answer_to, error_body, error_response, outcome_of
from services.gateway.exchange import Exchange
from services.gateway.groups import Engines
from services.gateway.jobs import Job
from services.gateway.live_choices import LiveChoices
from services.gateway.request_trace import RequestTrace
from services.gateway.stream import DONE, KEEP_ALIVE, Gathered, event, usage_body
from services.logs import about
from services.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_LAST_DELTA_TIMEOUT_S = 1.0


class AnswerResponse(Response):
    """Runs the job when the server asks for the response, so that no await lies between the engine's request and the
    code that ends it. trace: hears what happens, where the request is sampled."""

    def __init__(
        self,
        job: Job,
        client: Engines,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        trace: RequestTrace | None = None,
    ) -> None:
        super().__init__()
        self._job, self._client, self._config, self._metrics = job, client, config, metrics
        self._trace = trace
        self._error = ""
        self._choices = job.choices()
        self._sent_headers = False

    @property
    def _ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def _num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def _num_cached(self) -> int:
        leaders = self._choices[:: self._job.num_choices]
        return sum(choice.usage.cached_tokens for choice in leaders if choice.usage is not None)

    @property
    def _is_settled(self) -> bool:
        """The engine said what the prefix cache gave."""
        return all(choice.usage is not None for choice in self._choices[:: self._job.num_choices])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, status = "cancelled", 499
        try:
            with about(self._job.answer_id):
                logger.debug("handed to the engine: %d prompt tokens", self._job.num_prompt)
                outcome, status = await until_disconnect(receive, self._run(scope, receive, send))
        except Cancelled:
            logger.debug("the client went away")
        finally:
            self._record(Exchange.of(scope), outcome, status)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        """Returns how it ended, for the metrics: (outcome, HTTP status)."""
        try:
            async with LiveChoices(self._client, self._job.requests, self._job.num_choices) as live:
                await (self._stream if self._job.fields.stream else self._unary)(live, send)
            return self._choices[0].finish_reason or "stop", 200
        except ServingError as error:
            return await self._fail(error, scope, receive, send)
        except OSError:
            raise Cancelled("the client closed the connection") from None
        except Exception:
            logger.exception("answering failed")
            return await self._fail(InternalFault("internal error"), scope, receive, send)

    async def _fail(self, error: ServingError, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        if type(error) is TooLong:
            fields = self._job.fields
            error = ContextTooLong(str(error), fields.length_field if error.room else fields.prompt_field)
        if self._sent_headers:
            await _send_body(send, event(error_body(error)), more=False)
        else:
            await error_response(error, started=self._num_tokens > 0)(scope, receive, send)
        answer = answer_to(error)
        self._error = answer.code
        return self._metrics.failed(outcome_of(error), answer.code), answer.status

    async def _unary(self, live: LiveChoices, send: Send) -> None:
        gathered = [Gathered(choice) for choice in self._choices]
        while not self._ended:
            for choice, pieces in await self._take(live, None):
                for piece in pieces:
                    gathered[choice.index].add(piece)
        await self._settle(live)
        body = self._job.output.body(gathered, self._usage(), self._extra())
        await _send_head(send, "application/json", {"content-length": str(len(body))})
        self._sent_headers = True
        await _send_body(send, body, more=False)

    async def _stream(self, live: LiveChoices, send: Send) -> None:
        """The first wait ends before the headers, so that an early failure still has its own status."""
        output = self._job.output
        taken = await self._take(live, self._config.keepalive_s)
        await _send_head(send, "text/event-stream; charset=utf-8", _SSE_HEADERS)
        self._sent_headers = True
        opening = b"".join(output.opening(choice.index) for choice in self._choices)
        while True:
            events = opening + b"".join(self._events(choice, pieces) for choice, pieces in taken)
            if not taken:
                events += await self._keep_alive()
            if self._ended and (self._is_settled or not self._job.fields.include_usage):
                break
            if events:
                await _send_body(send, events)
            opening = events = b""
            if self._ended:
                break
            taken = await self._take(live, self._config.keepalive_s)
        await _send_body(send, events + await self._ending(live), more=False)

    async def _keep_alive(self) -> bytes:
        """A comment; before the first token it says where in the queue the request is."""
        place = None if self._num_tokens else await self._client.queue_position(self._job.requests[0].request_id)
        return f": keep-alive, place {place} in the queue\n\n".encode() if place else KEEP_ALIVE

    def _events(self, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        output = self._job.output
        events = b"".join(output.piece(choice, piece) for piece in pieces if piece)
        return events + output.finish(choice) if choice.finish_reason is not None else events

    async def _ending(self, live: LiveChoices) -> bytes:
        if not self._job.fields.include_usage:
            return DONE
        await self._settle(live)
        return self._job.output.usage(self._usage(), self._extra()) + DONE

    async def _take(self, live: LiveChoices, timeout_s: float | None) -> list[tuple[Choice, list[Piece]]]:
        """The pieces of every choice that got some; choices that ended are told so, once, and heard no more. Empty after
        `timeout_s`."""
        fresh = []
        for index, deltas in await live.take(timeout_s):
            choice = self._choices[index]
            if self._trace is not None:
                self._trace.add(index, deltas)
            if choice.finish_reason is None:
                fresh.append((choice, self._push(choice, deltas)))
                if choice.finish_reason is not None:
                    live.cancel(index)
            else:
                choice.usage = next((delta.usage for delta in deltas if delta.usage is not None), choice.usage)
        return fresh

    def _push(self, choice: Choice, deltas: Sequence[Delta]) -> list[Piece]:
        pieces = []
        for delta in deltas:
            if choice.finish_reason is None:
                pieces.append(choice.push(delta))
            else:
                choice.usage = delta.usage or choice.usage
        if choice.num_tokens:
            choice.last_s = time.monotonic()
            if not choice.first_s:
                if not any(each.first_s for each in self._choices):
                    self._metrics.first_token(choice.last_s - self._job.arrived_s)
                choice.first_s = choice.last_s
        return pieces

    async def _settle(self, live: LiveChoices) -> None:
        """After a stop string the engine still has to say what the prefix cache gave; it was asked to stop and is waited
        for, a moment."""
        deadline = time.monotonic() + _LAST_DELTA_TIMEOUT_S
        with contextlib.suppress(ServingError):
            while not self._is_settled and (left := deadline - time.monotonic()) > 0:
                await self._take(live, left)

    def _usage(self) -> dict[str, Any]:
        """A prompt is counted once, however many choices it has."""
        thought = sum(choice.num_reasoning_tokens for choice in self._choices) if self._job.may_think else None
        return usage_body(self._job.num_prompt, self._num_tokens, self._num_cached, thought)

    def _extra(self) -> dict[str, Any]:
        """`metrics`, which is of one choice: null when there are several."""
        level = self._config.speculation_metrics
        if level == "off":
            return {}
        if len(self._choices) > 1:
            return {"metrics": None}
        rounds, width = self._choices[0].rounds, self._job.model.card.draft_width
        return {"metrics": rounds.body(width, detailed=level == "detailed", asked=self._job.speculation)}

    def _record(self, exchange: Exchange, outcome: str, status: int) -> None:
        self._metrics.request_ended(outcome, status, time.monotonic() - self._job.arrived_s)
        for choice in self._choices:
            if choice.num_tokens > 1 and choice.last_s > choice.first_s:
                self._metrics.time_per_output_token((choice.last_s - choice.first_s) / (choice.num_tokens - 1))
        if self._trace is not None:
            self._trace.end([choice.finish_reason or outcome for choice in self._choices])
        exchange.outcome, exchange.error = outcome, self._error
        exchange.num_prompt_tokens, exchange.num_output_tokens = self._job.num_prompt, self._num_tokens
        exchange.num_cached_tokens = self._num_cached
        begun = [choice.first_s for choice in self._choices if choice.first_s]
        exchange.first_token_s = min(begun) - self._job.arrived_s if begun else 0.0


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
