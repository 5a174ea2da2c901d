"""One JSON line per HTTP request: who, what, how it ended, how long, how many tokens. Prompts only when a setting says so;
answers, keys and query strings never.

Lines are written by a thread of their own: a reader that stalls must not stall the server. When it is too slow, lines are
dropped and the next line that is written says how many.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.errors import SettingsError
from services.gateway.exchange import Exchange

_MOST_WAITING = 10_000
_MOST_PROMPT_BYTES = 1024 * 1024
_PROBES = ("/health", "/ready")
_PROMPT_FIELDS = ("messages", "prompt", "tools")


@dataclass(frozen=True, slots=True)
class AccessLogConfig:
    """to: `off`, `stderr`, `stdout` or the path of a file, which is appended to. prompts: log the prompts too."""

    to: str = "off"
    prompts: bool = False


NO_LOG = AccessLogConfig()


class LineWriter:
    """Writes records in order, in a thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        if self._num_dropped:
            record = {**record, "dropped_lines": self._num_dropped}
        try:
            self._lines.put_nowait(json.dumps(record, ensure_ascii=True))
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Everything written so far goes out first, unless that takes too long."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                # A closed pipe or a full disk: the log is lost, the service is not.
                self._num_dropped += 1


def open_writer(config: AccessLogConfig) -> LineWriter | None:
    """Raises SettingsError when the file cannot be appended to. None: the log is off."""
    if config.to == "off":
        return None
    if config.to in ("stderr", "stdout"):
        return LineWriter(sys.stderr if config.to == "stderr" else sys.stdout)
    try:
        return LineWriter(open(config.to, "a", encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"gateway.access_log.to: cannot append to {config.to}: {error.strerror}") from None


class AccessLog:
    """Writes the line of a request when its answer has ended or its client is gone. Probes that are answered well are left
    out: they come every few seconds."""

    def __init__(
        self, app: ASGIApp, write: Callable[[dict[str, Any]], None], prompts: bool = False, engine: str = ""
    ) -> None:
        self._app, self._write, self._prompts, self._engine = app, write, prompts, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun_s, status, body = time.monotonic(), 0, bytearray()

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def noting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and len(body) < _MOST_PROMPT_BYTES:
                body.extend(message.get("body", b"")[: _MOST_PROMPT_BYTES - len(body)])
            return message

        try:
            return await self._app(scope, noting_receive if self._prompts else receive, noting_send)
        finally:
            if scope["path"] not in _PROBES or status != 200:
                prompt = _prompt(bytes(body)) if self._prompts else {}
                record = _record(scope, status, time.monotonic() - begun_s)
                self._write(record | {"engine": self._engine or None} | prompt)


def _record(scope: Scope, status: int, duration_s: float) -> dict[str, Any]:
    """Status 499: the client went before there was one."""
    exchange = Exchange.of(scope)
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": exchange.request_id,
        "answer_id": exchange.answer_id or None,
        "key": exchange.api_key or None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status or 499,
        "duration_ms": round(duration_s * 1000, 1),
        "first_token_ms": round(exchange.first_token_s * 1000, 1) if exchange.first_token_s else None,
        "model": exchange.model[:100] or None,
        "stream": exchange.stream,
        "prompt_tokens": exchange.num_prompt_tokens,
        "cached_tokens": exchange.num_cached_tokens,
        "output_tokens": exchange.num_output_tokens,
        "finish_reason": exchange.outcome or None,
    } | ({"trace_id": exchange.trace.trace_id} if exchange.trace is not None else {})


def _prompt(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {name: asked[name] for name in _PROMPT_FIELDS if name in asked} if isinstance(asked, dict) else {}
