"""The lightest client of a streamed chat: one connection that is kept, and of each answer when its first and its last text came.

It shares its cores with what it measures, so it looks at bytes and parses nothing but the number of tokens.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

_GOOD = b"HTTP/1.1 200 "
_TEXT = b'"delta":{"content":"'
_END = b"data: [DONE]\n\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_NUM_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class StreamedAnswer:
    """Seconds on time.perf_counter; num_tokens: as the usage chunk says."""

    began_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


class AnswerConnection(asyncio.Protocol):
    """One request at a time. Raises ConnectionError for any answer that is not a complete stream."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            "content-length: "
        ).encode()
        self._received = bytearray()
        self._answer = StreamedAnswer(0.0)
        self._done: asyncio.Future[StreamedAnswer] | None = None

    async def ask(self, body: bytes) -> StreamedAnswer:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._transport, _ = await loop.create_connection(lambda: self, self._host, self._port)
        self._received.clear()
        self._done = loop.create_future()
        self._answer = StreamedAnswer(time.perf_counter())
        self._transport.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        answer, seen = self._answer, self._received
        begins = max(0, len(seen) - len(_TEXT))
        seen += data
        if seen.find(_TEXT, begins) >= 0:
            answer.last_s = time.perf_counter()
            answer.first_s = answer.first_s or answer.last_s
        if self._done is None or self._done.done():
            return
        if not seen.startswith(_GOOD):
            self._done.set_exception(ConnectionError(f"not an answer: {bytes(seen)!r}"))
        elif seen.endswith(_LAST_CHUNK):
            self._finish(self._done)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(
                ConnectionError(f"the server closed the connection: {bytes(self._received[:300])!r}")
            )

    def _finish(self, done: asyncio.Future[StreamedAnswer]) -> None:
        tokens = _NUM_TOKENS.search(self._received)
        if _END not in self._received or tokens is None:
            done.set_exception(ConnectionError(f"no complete answer: {bytes(self._received[-300:])!r}"))
            return
        self._answer.num_tokens = int(tokens.group(1))
        done.set_result(self._answer)
