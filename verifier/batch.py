"""Packs a Plan into the flat tensors of one forward, and says which rows are sampled and which are kept.

Flat order is the plan's order; an extension's rows are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.wire import Extension, IntArray, Plan, Verdict
from verifier.attention import Span
from verifier.masks import Constraint, TokenMasks

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """N rows. ids, positions, slots [N] int64; previous_slots [N] int64: the slot of the position before, 0 where there is
    none; sampled_rows [S]: for each sampling extension, the row of its last known token and of each draft; `sampling` those
    extensions in order. masks: of the S logits rows that a grammar constrains.

    Drafts that a grammar makes pointless are neither in `ids` nor in `sampling`. The last draft of those that are judged may
    have no row of its own, being rejected for certain; the row before it stands in, and what it says is never used.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    previous_slots: Tensor
    spans: tuple[Span, ...]
    sampled_rows: Tensor
    sampling: tuple[Extension, ...]
    masks: TokenMasks | None = None


def pack(
    plan: Plan, block_size: int, device: torch.device, constraints: Mapping[str, Constraint] | None = None
) -> FlatBatch:
    """constraints: by request id, for the sampling extensions that have a grammar."""
    constraints = constraints or {}
    spans: list[Span] = []
    ids: list[IntArray] = []
    sampled: list[int] = []
    sampling: list[Extension] = []
    masked: list[tuple[int, Constraint]] = []
    row = 0
    for extension in plan.extensions:
        n = _num_rows(extension, constraints)
        spans.append(Span(row, n, extension.start, extension.block_ids))
        ids.append(extension.token_ids[:n])
        row += n
        if extension.samples:
            constraint = constraints.get(extension.request_id)
            judged = extension if constraint is None else _shortened(extension, constraint.num_judged)
            first = row - n + len(extension.token_ids) - extension.num_draft - 1
            if constraint is not None:
                masked.append((len(sampled), constraint))
            sampled += [min(first + k, row - 1) for k in range(judged.num_draft + 1)]
            sampling.append(judged)
    positions, slots, previous = _places(spans, block_size)
    return FlatBatch(
        ids=_tensor(np.concatenate(ids), device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        previous_slots=_tensor(previous, device),
        spans=tuple(spans),
        sampled_rows=_tensor(np.array(sampled, dtype=np.int64), device),
        sampling=tuple(sampling),
        masks=_masks(masked),
    )


def _places(spans: Sequence[Span], block_size: int) -> tuple[Ints, Ints, Ints]:
    """Position, slot and previous slot of each row: what `slots_of` gives span by span, for all at once."""
    num_rows = np.array([span.num_rows for span in spans])
    shifts = np.array([span.start - span.first_row for span in spans], dtype=np.int64)
    positions = np.arange(num_rows.sum()) + np.repeat(shifts, num_rows)
    tables = np.concatenate([span.block_ids for span in spans])
    lengths = np.array([len(span.block_ids) for span in spans])
    first_blocks = np.repeat(np.cumsum(lengths) - lengths, num_rows)

    def slots(places: Ints) -> Ints:
        return tables[first_blocks + places // block_size].astype(np.int64) * block_size + places % block_size

    return positions, slots(positions), np.where(positions > 0, slots(np.maximum(positions - 1, 0)), 0)


def _num_rows(extension: Extension, constraints: Mapping[str, Constraint]) -> int:
    constraint = constraints.get(extension.request_id)
    skipped = extension.num_draft - constraint.num_run if constraint is not None else 0
    return len(extension.token_ids) - skipped


def _shortened(extension: Extension, num_draft: int) -> Extension:
    """The extension with its first `num_draft` drafts."""
    if num_draft == extension.num_draft:
        return extension
    return replace(
        extension,
        token_ids=extension.token_ids[: len(extension.token_ids) - extension.num_draft + num_draft],
        num_draft=num_draft,
        q_ids=extension.q_ids[:num_draft] if extension.q_ids is not None else None,
        q_probs=extension.q_probs[:num_draft] if extension.q_probs is not None else None,
    )


def _masks(masked: Sequence[tuple[int, Constraint]]) -> TokenMasks | None:
    """masked: each constraint with the logits row it begins at."""
    if not masked:
        return None
    rows = np.concatenate([first + np.arange(len(constraint.words)) for first, constraint in masked])
    return TokenMasks(rows, np.concatenate([constraint.words for _, constraint in masked]))


def kept_rows(
    plan: Plan, verdicts: Sequence[Verdict], constraints: Mapping[str, Constraint] | None = None
) -> list[int]:
    """Flat rows whose tokens are now committed: everything but the rejected drafts, and nothing of a request that failed."""
    rows: list[int] = []
    first = 0
    for extension, verdict in zip(plan.extensions, verdicts, strict=True):
        num_known = len(extension.token_ids) - extension.num_draft
        if verdict.error is None:
            rows.extend(range(first, first + num_known + verdict.num_accepted))
        first += _num_rows(extension, constraints or {})
    return rows


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)
