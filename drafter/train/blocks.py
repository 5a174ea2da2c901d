"""From states to a training batch: which anchors, how long their blocks, what each slot is to predict.

Owns the alignment (slot k of anchor a predicts token a + k from the target's law at row a + k - 1). Must not know networks.

Shapes: n tokens of a sequence, A anchors, L slots per block, N = sum of A L, T rows of laws (an answer of t tokens has t - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.train.loss import Slots, slot_weights
from drafter.train.network import Blocks
from drafter.train.states import Spans, States


@dataclass(frozen=True, slots=True)
class Batch:
    """blocks: one per sequence. last [T, d], lse [T]: rows of the laws. previous_ids, label_ids [N]: target ids before
    and at each slot. law_rows [N], weights [N]: as in `Slots`, weight 0 where the answer has ended before the slot."""

    blocks: list[Blocks]
    last: Tensor
    lse: Tensor
    previous_ids: Tensor
    label_ids: Tensor
    law_rows: Tensor
    weights: Tensor

    @property
    def num_positions(self) -> int:
        return int((self.weights > 0).sum())

    def to(self, device: torch.device) -> Batch:
        blocks = [b.to(device) for b in self.blocks]
        rest = (self.last, self.lse, self.previous_ids, self.label_ids, self.law_rows, self.weights)
        return Batch(blocks, *(tensor.to(device) for tensor in rest))

    def slots(self, column_of: Tensor, num_columns: int) -> Slots:
        """column_of [V]: draft-vocabulary column of each target id, num_columns for ids outside."""
        columns = column_of.index_select(0, self.label_ids)
        return Slots(self.law_rows, columns.masked_fill(columns == num_columns, -1), self.weights)


def valid_anchors(states: States) -> Tensor:
    """Answer tokens with a token after them; the last prompt token is no anchor (at serving it never is)."""
    return _anchors_of(states.spans)


def draw_anchors(spans: Spans, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` anchors, uniform without replacement, ascending."""
    anchors = _anchors_of(spans)
    if len(anchors) <= limit:
        return anchors
    return anchors[torch.randperm(len(anchors), generator=generator)[:limit].sort().values]


def answer_ends(spans: Spans, anchors: Tensor) -> Tensor:
    """[A] end of the answer that each anchor is a token of."""
    ends = torch.tensor([end for _, end in spans])
    return ends[torch.searchsorted(ends, anchors, right=True)]


def _anchors_of(spans: Spans) -> Tensor:
    return torch.cat([torch.arange(start, max(start, end - 1)) for start, end in spans])


def build_batch(parts: Sequence[tuple[States, Tensor, int]], decay: float) -> Batch:
    """parts: (states, anchors [A], block length) per sequence."""
    blocks, columns, laws = [], [], []
    first_law = 0
    for states, anchors, length in parts:
        ids, rows = states.ids.long(), valid_anchors(states)
        # rows after the last anchor are never seen
        blocks.append(Blocks(states.features[: int(anchors.max())], anchors, ids, length))
        targets = anchors.unsqueeze(1) + torch.arange(1, length + 1)
        ends = answer_ends(states.spans, anchors).unsqueeze(1)
        inside = targets < ends
        targets = torch.minimum(targets, ends - 1)
        law_of = torch.zeros(len(ids), dtype=torch.int64)
        law_of[rows] = torch.arange(first_law, first_law + len(rows))
        columns.append((ids[targets - 1], ids[targets], law_of[targets - 1], slot_weights(length, decay) * inside))
        laws.append((_rows_of(states.last, rows), _rows_of(states.lse, rows)))
        first_law += len(rows)
    previous_ids, label_ids, law_rows, weights = (torch.cat([c[i].flatten() for c in columns]) for i in range(4))
    last, lse = (torch.cat([law[i] for law in laws]) for i in range(2))
    return Batch(blocks, last, lse, previous_ids, label_ids, law_rows, weights)


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """States may lie on another device than the ids."""
    return tensor.index_select(0, rows.to(tensor.device))
