"""A drafter that knows what comes, for tests: always right, always wrong, and one that breaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.errors import DrafterLost
from scheduler.wire import Draft, DraftAsk, DrafterInfo

WIDTH = 7


class ReplayDrafter:
    """Drafts from a known continuation: `shift` 0 is always right, 1 always wrong. `breaks_after` that many calls it is lost."""

    def __init__(self, continuations: Sequence[Sequence[int]], shift: int = 0, vocab_size: int = 48) -> None:
        self.continuations, self.shift, self.vocab_size = continuations, shift, vocab_size
        self.broken = False
        self.breaks_after: int | None = None

    async def progress(self) -> int:
        return 0

    async def describe(self) -> DrafterInfo:
        if self.broken:
            raise DrafterLost("gone")
        return DrafterInfo("replay", WIDTH, True, False, 10_000, (), "replay", needs_tokens=True)

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[object]) -> list[Draft]:
        if self.breaks_after is not None:
            self.breaks_after -= 1
            self.broken |= self.breaks_after < 0
        if self.broken:
            raise DrafterLost("gone")
        return [Draft(ask.request_id, self._next(ask, width), None) for ask in asks]

    def _next(self, ask: DraftAsk, width: int) -> np.ndarray:
        known = [] if ask.context_ids is None else ask.context_ids[-ask.output_index :].tolist()
        for ids in self.continuations:
            if list(ids[: len(known)]) == known:
                upcoming = np.array(ids[len(known) : len(known) + width], dtype=np.int32)
                return (upcoming + self.shift) % self.vocab_size
        return np.zeros(0, dtype=np.int32)

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return [[1e-6] * len(widths) for _ in num_requests]
