"""A running event loop whose clock jumps to whatever is due next: a stall of the machine cannot change what happens when."""

from __future__ import annotations

import asyncio
import time

import pytest

TURN_S = 1e-5


def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the running loop never waits for a timer, and `time.monotonic` is its clock.

    Every turn of the loop takes TURN_S, so that what turns for ever meets its timeout. For work of this loop alone: what a
    thread or another process does takes no time, and a timeout over it is over at once.
    """
    loop, now = asyncio.get_running_loop(), [time.monotonic()]
    selector = loop._selector
    select = selector.select

    def jump(timeout: float | None = None) -> list:
        events = select(None if timeout is None else 0)
        now[0] += TURN_S if events or not timeout else max(timeout, TURN_S)
        return events

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(selector, "select", jump)
