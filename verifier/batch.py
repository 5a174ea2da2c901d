"""Packs a Plan into the flat tensors of one forward, and says which rows are sampled and which are kept.

Flat order is the plan's order; an extension's rows are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.wire import Extension, Plan, Verdict
from verifier.attention import Span
from verifier.kv import slots_of


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """N rows. ids, positions, slots [N] int64; sampled_rows [S]: for each sampling extension, the row of its last known
    token and of each draft; `sampling` those extensions in order."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    sampled_rows: Tensor
    sampling: tuple[Extension, ...]


def pack(plan: Plan, block_size: int, device: torch.device) -> FlatBatch:
    extensions = plan.extensions
    spans: list[Span] = []
    sampled: list[range] = []
    row = 0
    for extension in extensions:
        n = len(extension.token_ids)
        spans.append(Span(row, n, extension.start, extension.block_ids))
        row += n
        if extension.samples:
            sampled.append(range(row - extension.num_draft - 1, row))
    positions = [np.arange(s.start, s.context_len, dtype=np.int64) for s in spans]
    slots = [slots_of(s.block_ids, s.start, s.context_len, block_size) for s in spans]
    return FlatBatch(
        ids=_tensor(np.concatenate([e.token_ids for e in extensions]), device),
        positions=_tensor(np.concatenate(positions), device),
        slots=_tensor(np.concatenate(slots), device),
        spans=tuple(spans),
        sampled_rows=_tensor(np.fromiter((r for rows in sampled for r in rows), dtype=np.int64), device),
        sampling=tuple(e for e in extensions if e.samples),
    )


def kept_rows(plan: Plan, verdicts: Sequence[Verdict]) -> list[int]:
    """Flat rows whose tokens are now committed: everything but the rejected drafts."""
    rows: list[int] = []
    first = 0
    for extension, verdict in zip(plan.extensions, verdicts, strict=True):
        n = len(extension.token_ids)
        rows.extend(range(first, first + n - extension.num_draft + verdict.num_accepted))
        first += n
    return rows


def previous_slots(batch: FlatBatch, block_size: int) -> Tensor:
    """[N] slot of the position before each row's, 0 before a request's first position."""
    found = []
    for span in batch.spans:
        slots = slots_of(span.block_ids, max(0, span.start - 1), span.context_len - 1, block_size)
        found.append(slots if span.start else np.concatenate((np.zeros(1, dtype=np.int64), slots)))
    return _tensor(np.concatenate(found), batch.slots.device)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)
