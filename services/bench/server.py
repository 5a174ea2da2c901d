"""The benchmark's client of a running server: one streamed completion, timed by its chunks, counted by its usage chunk.

Time per output token is taken from first to last content over all tokens, never from gaps between chunks: a chunk is a
verify round and carries several tokens.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from scheduler.errors import Failed
from services.generate import Tally

_TIMEOUT_S = 600.0


async def served_model(url: str) -> str:
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        try:
            return (await client.get(f"{url.rstrip('/')}/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise Failed(f"--url {url}: no models there ({type(error).__name__}: {error})") from None


async def ask_server(url: str, body: dict[str, Any]) -> Tally:
    tally = Tally()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        try:
            async with client.stream("POST", f"{url.rstrip('/')}/chat/completions", json=wanted) as response:
                if response.status_code != 200:
                    raise Failed(f"--url {url}: {response.status_code} {(await response.aread()).decode()}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _count(tally, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise Failed(f"--url {url}: {type(error).__name__}: {error}") from None
    return tally


def _count(tally: Tally, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise Failed(chunk["error"]["message"])
    if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
        now = time.monotonic() - tally.began
        tally.first_token_s = tally.first_token_s or now
        tally.last_token_s = now
    if chunk.get("usage"):
        tally.num_tokens = chunk["usage"]["completion_tokens"]
        numbers = (chunk.get("metrics") or {}).get("speculative_decoding", {})
        tally.num_rounds = numbers.get("num_spec_steps", 0)
        tally.num_accepted = numbers.get("num_accepted_draft_tokens", 0)
        tally.num_verified = numbers.get("num_draft_tokens", 0)
        tally.num_round_tokens = tally.num_rounds + tally.num_accepted
