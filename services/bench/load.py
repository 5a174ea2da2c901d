"""Two ways to load a server: clients that each wait for their answer (closed loop), and Poisson arrivals (open loop).

What is counted is a window in which the load is what it is said to be: from the start until the first client finds no prompt
left; from a fifth of the arrivals to the last. What runs on after it is waited for and not counted. Knows no planners.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler.errors import Overloaded
from services.generate import Tally

Ask = Callable[[str], Awaitable[Tally]]

_WARM_SHARE = 0.2


@dataclass(slots=True)
class Answers:
    """began, ended: of the window, monotonic seconds. num_refused: answered with "overloaded"."""

    began: float
    ended: float = 0.0
    tallies: list[Tally] = field(default_factory=list)
    num_refused: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def num_tokens(self) -> float:
        """Output tokens in the window."""
        return sum(tokens_between(tally, self.began, self.ended) for tally in self.tallies)

    @property
    def counted(self) -> list[Tally]:
        """Answers that were asked for in the window."""
        return [tally for tally in self.tallies if self.began <= tally.began <= self.ended]


def tokens_between(tally: Tally, began: float, ended: float) -> float:
    """Of one answer: its first token when it came, the others spread evenly from there to the last."""
    if not tally.num_tokens:
        return 0.0
    first, last = tally.began + tally.first_token_s, tally.began + tally.last_token_s
    tokens = 1.0 if began <= first <= ended else 0.0
    if last > first:
        tokens += (tally.num_tokens - 1) * max(0.0, min(last, ended) - max(first, began)) / (last - first)
    elif tokens:
        tokens = float(tally.num_tokens)
    return tokens


async def closed_loop(prompts: Sequence[str], concurrency: int, ask: Ask) -> Answers:
    """Each of `concurrency` clients asks, waits for the whole answer, asks the next prompt."""
    waiting = iter(prompts)
    answers = Answers(time.monotonic())

    async def client() -> None:
        for prompt in waiting:
            answers.tallies.append(await ask(prompt))
        answers.ended = answers.ended or time.monotonic()

    await run_all(client() for _ in range(concurrency))
    return answers


async def open_loop(prompts: Sequence[str], rate: float, ask: Ask, *, seed: int) -> Answers:
    """One arrival per prompt, `rate` a second on average; the same times for the same seed."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(prompts)))
    start = time.monotonic()
    answers = Answers(start + float(times[int(_WARM_SHARE * len(times))]), start + float(times[-1]))

    async def arrival(prompt: str, at: float) -> None:
        await asyncio.sleep(start + at - time.monotonic())
        try:
            answers.tallies.append(await ask(prompt))
        except Overloaded:
            answers.num_refused += answers.began <= start + at

    await run_all(arrival(prompt, float(at)) for prompt, at in zip(prompts, times, strict=True))
    return answers


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """To the end, or to the first failure, which ends the others too."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
