"""Waiting in an event loop for what has no event of its own. The bound only ends what hangs, so it is generous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Raises TimeoutError when `condition` is still false after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
