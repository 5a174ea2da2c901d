"""The body of a request, refused as soon as it is known to be too large or too slow. Knows no models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from scheduler.errors import Cancelled
from services.gateway.config import GatewayConfig
from services.gateway.errors import BodyTooLarge, BodyTooSlow
from services.gateway.within import within

_LARGE_BODY_BYTES = 64 * 1024

T = TypeVar("T")


async def read_body(request: Request, config: GatewayConfig, parse: Callable[[bytes], T]) -> T:
    """The parsed body. Large ones are parsed in a thread: other streams must not wait for them."""
    try:
        body = await within(config.stalled_s, _whole(request, config.max_body_bytes))
    except TimeoutError:
        raise BodyTooSlow(f"the request body did not arrive within {config.stalled_s:g} s") from None
    return parse(body) if len(body) <= _LARGE_BODY_BYTES else await asyncio.to_thread(parse, body)


async def _whole(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    too_large = declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes)
    try:
        async for piece in request.stream():
            too_large = too_large or len(body) + len(piece) > max_bytes
            if too_large:
                raise BodyTooLarge(f"the request body is larger than the {max_bytes} bytes allowed")
            body += piece
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    return bytes(body)
