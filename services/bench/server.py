"""The benchmark's client of a running server: one streamed completion, timed by its chunks, counted by its usage chunk.

Time per output token is taken from first to last content over all tokens, never from gaps between chunks: a chunk is a
verify round and carries several tokens.
"""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any

import httpx

from scheduler.errors import Failed, Overloaded
from services.generate import Tally

_TIMEOUT_S = 600.0
_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=128)


class Server:
    """url: up to /v1. Connections are kept, so that connecting is not measured."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, limits=_CONNECTIONS)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def served_model(self) -> str:
        try:
            return (await self._client.get(f"{self._url}/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise Failed(f"--url {self._url}: no models there ({type(error).__name__}: {error})") from None

    async def ask(self, body: dict[str, Any]) -> Tally:
        """Raises Overloaded for 429, Failed for everything else."""
        tally = Tally()
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._client.stream("POST", f"{self._url}/chat/completions", json=wanted) as response:
                await self._check(response)
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        count_chunk(tally, json.loads(line.removeprefix("data: ")), body.get("speculation"))
        except httpx.HTTPError as error:
            raise Failed(f"--url {self._url}: {type(error).__name__}: {error}") from None
        return tally

    async def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        message = f"--url {self._url}: {response.status_code} {(await response.aread()).decode()}"
        raise Overloaded(message) if response.status_code == 429 else Failed(message)


def count_chunk(tally: Tally, chunk: dict[str, Any], speculation: dict[str, Any] | None = None) -> None:
    """Adds one chunk of the stream. speculation: what was asked for; raises Failed when the server does not say it held."""
    if "error" in chunk:
        raise Failed(chunk["error"]["message"])
    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
        now = time.monotonic() - tally.began
        tally.first_token_s = tally.first_token_s or now
        tally.last_token_s = now
    if not chunk.get("usage"):
        return
    tally.num_tokens = chunk["usage"]["completion_tokens"]
    numbers = (chunk.get("metrics") or {}).get("speculative_decoding", {})
    if speculation is not None and numbers.get("mode") != speculation["mode"]:
        raise Failed(
            f"the server does not report speculation.mode {speculation['mode']!r} as being in force "
            f"({numbers.get('mode')!r}); leave --planners out to measure it as it is configured"
        )
    tally.num_rounds = numbers.get("num_spec_steps", 0)
    tally.num_accepted = numbers.get("num_accepted_draft_tokens", 0)
    tally.num_verified = numbers.get("num_draft_tokens", 0)
    tally.num_round_tokens = tally.num_rounds + tally.num_accepted
