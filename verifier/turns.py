"""Times several pieces of work in turns: a slow second of the machine meets a run of each, not all runs of one.

Measured one after the other, a cost curve has the machine's mood in it: sizes timed while a neighbour was busy look twice
as dear as others, and what looks dear is not run, so that nothing corrects it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_SLOW_S = 0.05  # work that takes longer has fewer turns: what disturbs a timing is short
_SLOW_TURNS = 3


def median_seconds(works: Sequence[Callable[[], object]], device: torch.device, *, turns: int = 7) -> list[float]:
    """Of each piece of work, which is run once before. What a CUDA device still has to do is waited for."""
    waits = device.type == "cuda"
    seconds: list[list[float]] = [[] for _ in works]

    def run(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if waits:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    for work in works:
        run(work)
    for turn in range(turns):
        for work, own in zip(works, seconds, strict=True):
            if turn < _SLOW_TURNS or statistics.median(own) <= _SLOW_S:
                own.append(run(work))
    return [statistics.median(own) for own in seconds]


def median_table(works: Sequence[Sequence[Callable[[], object]]], device: torch.device) -> list[list[float]]:
    """The same of rows of works, all in one round of turns."""
    seconds = iter(median_seconds([work for row in works for work in row], device))
    return [[next(seconds) for _ in row] for row in works]
