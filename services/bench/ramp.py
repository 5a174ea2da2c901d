"""A load that rises and falls: clients by stages, and what each arm made of it in the course of time. Knows no planners.

Everything comes from the answers' tallies, so it is the same for an engine in this process and a running server. Within an answer
tokens and verify rounds are spread evenly from its first token to its last: an answer should be short against a stage.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np

from scheduler.errors import SettingsError
from services.bench.load import Ask, run_all
from services.bench.pictures import Ramp
from services.generate import Tally

# Points of a curve per stage.
_BINS = 8


def stages_of(text: str) -> tuple[int, ...]:
    """Of `1-16-1` 1, 16 and 1; raises SettingsError."""
    parts = text.split("-")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() and 0 < int(part) < 100_000 for part in parts):
        raise SettingsError(f"--ramp {text!r}: write clients by stages, for example 1-16-1")
    return tuple(int(part) for part in parts)


async def ramp_load(
    prompts: Sequence[str], stages: Sequence[int], stage_s: float, ask: Ask
) -> tuple[float, list[Tally]]:
    """Runs stage after stage, each with so many clients for stage_s seconds, of whom each ends the answer that it has begun. Its
    beginning on the monotonic clock, and all answers."""
    waiting, tallies = itertools.cycle(prompts), list[Tally]()
    began = time.monotonic()

    async def client(number: int) -> None:
        for stage, clients in enumerate(stages):
            await asyncio.sleep(began + stage * stage_s - time.monotonic())
            while number < clients and time.monotonic() < began + (stage + 1) * stage_s:
                tallies.append(await ask(next(waiting)))

    await run_all(client(number) for number in range(max(stages)))
    return began, tallies


def course(began: float, tallies: Sequence[Tally], stages: Sequence[int], stage_s: float) -> Ramp:
    """How that went, by time."""
    edges = np.linspace(0.0, stage_s * len(stages), _BINS * len(stages) + 1)
    live, tokens, rounds, verified = (np.zeros(len(edges) - 1) for _ in range(4))
    for tally in tallies:
        first, last = tally.began - began + tally.first_token_s, tally.began - began + tally.last_token_s
        inside = np.maximum(0.0, np.minimum(last, edges[1:]) - np.maximum(first, edges[:-1]))
        share = inside / max(last - first, 1e-9)
        live += inside / np.diff(edges)
        tokens += share * tally.num_tokens
        rounds += share * tally.num_rounds
        verified += share * tally.num_verified
    busy = rounds > 0.0
    return Ramp(
        seconds=edges[1:][busy].tolist(),
        live=live[busy].tolist(),
        tokens_per_s=(tokens / np.diff(edges))[busy].tolist(),
        budget=(1.0 + verified[busy] / rounds[busy]).tolist(),
    )
