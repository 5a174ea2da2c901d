"""A drafter that proposes what a script says: each request's future as it will be, or any other. No context, no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.wire import Draft, DraftAsk, DrafterInfo


@dataclass
class ScriptedDrafter:
    """scheduler.ports.Drafter. script: request id -> what to draft at (output index k) for k = output_index..; no entry drafts
    nothing. Drafts are certain (no q)."""

    width: int = 7
    script: dict[str, Callable[[int], int]] = field(default_factory=dict)

    async def progress(self) -> int:
        return 0

    async def describe(self) -> DrafterInfo:
        return DrafterInfo("scripted", self.width, True, False, 2**31 - 1, (), "scripted")

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[object]) -> list[Draft]:
        return [Draft(ask.request_id, self._tokens(ask, width), None) for ask in asks]

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return [[1e-6 for _ in widths] for _ in num_requests]

    def _tokens(self, ask: DraftAsk, width: int) -> np.ndarray:
        says = self.script.get(ask.request_id)
        count = width if says is not None else 0
        return np.array([says(ask.output_index + k) for k in range(count) if says is not None], dtype=np.int32)


def right(text: Sequence[int]) -> Callable[[int], int]:
    """Drafts the text itself; past its end, token 0."""
    return lambda position: text[position] if position < len(text) else 0


def wrong(text: Sequence[int], vocab_size: int) -> Callable[[int], int]:
    return lambda position: (right(text)(position) + 1) % vocab_size
