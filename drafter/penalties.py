"""What requests ask of the target's logits, done to a drafter's as well, so that drafts are not rejected for want of it.

Penalties are those at the anchor: tokens drafted in the same block are not counted. Whatever this leaves out costs acceptance,
never exactness: the law that a draft is judged by is the one it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from scheduler.wire import DraftAsk
from verifier.penalties import change_at, changes_logits


class AskedChanges:
    """Made once a proposal. vocabulary [Vd]: target ids, ascending, of a draft vocabulary's columns; None: the target's own."""

    def __init__(self, asks: Sequence[DraftAsk], vocabulary: Tensor | None, device: torch.device) -> None:
        self._changes = [
            (row, *_columns(ask, vocabulary, device)) for row, ask in enumerate(asks) if changes_logits(ask.params)
        ]

    def apply(self, logits: Tensor) -> Tensor:
        """logits [R, Vd] or [R, w, Vd], one row per ask, changed in place and returned."""
        for row, columns, divisor, summand in self._changes:
            old = logits[row][..., columns].float()
            new = torch.where(old > 0, old / divisor, old * divisor).add_(summand)
            logits[row][..., columns] = new.to(logits.dtype)
        return logits


def _columns(ask: DraftAsk, vocabulary: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Columns that change, their divisors and summands, each [U]."""
    ids, divisor, summand = change_at(ask.params, ask.context_ids, ask.output_index)
    columns = ids
    if vocabulary is not None:
        known = vocabulary.cpu().numpy()
        columns = np.searchsorted(known, ids).clip(max=len(known) - 1)
        there = known[columns] == ids
        columns, divisor, summand = columns[there], divisor[there], summand[there]
    return (
        torch.from_numpy(columns).to(device),
        torch.from_numpy(divisor).to(device, torch.float32),
        torch.from_numpy(summand).to(device, torch.float32),
    )
