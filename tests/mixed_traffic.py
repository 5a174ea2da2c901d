"""What clients of all kinds send to the small golden target: drafted and plain, seeded, by grammar, wrong, too late, too many,
and clients that leave. Each way is a function of a client and a number; `send` runs them side by side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.running_prometheus import until

_REFUSED_S = 0.05
CHAT = "/v1/chat/completions"
PROMPTS = (
    "hello",
    "def area(x): return x*x; import math; print(area(3));",
    "solve 3*x + 4 = 19, 2*y = 8, x + y = 9",
    "the cat sat on the mat and looked at the dog for a long time",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "speculation": {"mode": "fixed:3"}},
    {"temperature": 0.8, "speculation": {"mode": "fixed:5"}},
    {"temperature": 0.7, "seed": 7, "stream": True},
    {"speculation": {"mode": "off"}},
    {"guided_regex": "[ab]{2}[0-9]{3}", "stop_token_ids": [10]},
    {"n": 2, "temperature": 1.0, "speculation": {"mode": "fixed:3"}},
    {"n": 0},
    {"max_tokens": 100_000},
    {"model": "another"},
    {"timeout": 0.002, "max_tokens": 80},
    {"stream": True, "max_tokens": 80, "leave": True},
    {"stream": True, "timeout": 0.01, "max_tokens": 80},
)

# 429 comes of the queue, whatever is asked.
STATUSES = (200, 400, 404, 429, 504)


def body(number: int, model: str, changes: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
    return {"model": model, "messages": messages, "max_tokens": 24} | changes


def ask(client: httpx.Client, number: int, model: str) -> int:
    """Sends the way of this number to its end, or leaves in its middle. The HTTP status."""
    changes = dict(WAYS[number % len(WAYS)])
    leaves = changes.pop("leave", False)
    with client.stream("POST", CHAT, json=body(number, model, changes)) as response:
        for _ in response.iter_lines():
            if leaves:
                break
    return response.status_code


def send(url: str, model: str, *, at_once: int, least: int) -> Counter[int]:
    """All ways in turn, until each status that they are about came so often. How often which came."""
    statuses: Counter[int] = Counter()
    numbers = itertools.count()

    def one(http: httpx.Client) -> int:
        status = ask(http, next(numbers), model)
        statuses[status] += 1
        return status

    with asking(url, one, at_once):
        until(lambda: all(statuses[status] >= least for status in STATUSES), what=lambda: statuses)
    return statuses


@contextlib.contextmanager
def asking(url: str, one: Callable[[httpx.Client], int], at_once: int, pause_s: float = 0.0) -> Iterator[None]:
    """Clients that do `one` again and again, side by side, until the block is left; it gives an HTTP status. A client whose
    server goes away tries again. pause_s: between an answer and the next request."""
    leaving = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not leaving.is_set():
                status = 0
                with contextlib.suppress(httpx.TransportError):
                    status = one(http)
                leaving.wait(_REFUSED_S if status in (0, 429, 503) else pause_s)

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        clients = [pool.submit(client) for _ in range(at_once)]
        try:
            yield
        finally:
            leaving.set()
        for each in clients:
            each.result()
