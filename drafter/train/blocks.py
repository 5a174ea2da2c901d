"""From states to a training batch: which anchors, how long their blocks, what each slot is to predict.

Owns the alignment (slot k of anchor a predicts token a + k from the target's law at row a + k - 1). Must not know networks.

Shapes: n tokens of a sequence, P of them prompt, A anchors, L slots per block, N = sum of A L, T = sum of n - 1 - P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.train.loss import Slots, slot_weights
from drafter.train.network import Blocks
from drafter.train.states import States


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

    def slots(self, column_of: Tensor, num_columns: int) -> Slots:
        """column_of [V]: draft-vocabulary column of each target id, num_columns for ids outside."""
        columns = column_of.index_select(0, self.label_ids)
        return Slots(self.law_rows, columns.masked_fill(columns == num_columns, -1), self.weights)


def valid_anchors(states: States) -> Tensor:
    """Answer tokens with a token after them; the last prompt token is no anchor (at serving it never is)."""
    return torch.arange(states.prompt_len, states.ids.shape[0] - 1)


def draw_anchors(states: States, limit: int, generator: torch.Generator) -> Tensor:
    """Up to `limit` anchors, uniform without replacement, ascending."""
    anchors = valid_anchors(states)
    if len(anchors) <= limit:
        return anchors
    return anchors[torch.randperm(len(anchors), generator=generator)[:limit].sort().values]


def build_batch(parts: Sequence[tuple[States, Tensor, int]], decay: float) -> Batch:
    """parts: (states, anchors [A], block length) per sequence."""
    blocks, columns = [], []
    first_law = 0
    for states, anchors, length in parts:
        n, prompt_len = states.ids.shape[0], states.prompt_len
        ids = states.ids.long()
        # rows after the last anchor are never seen
        blocks.append(Blocks(states.features[: int(anchors.max())], anchors, ids, length))
        targets = anchors.unsqueeze(1) + torch.arange(1, length + 1)
        inside = targets < n
        targets = targets.clamp_max(n - 1)
        weights = slot_weights(length, decay) * inside
        columns.append((ids[targets - 1], ids[targets], targets - 1 - prompt_len + first_law, weights))
        first_law += n - 1 - prompt_len
    previous_ids, label_ids, law_rows, weights = (torch.cat([c[i].flatten() for c in columns]) for i in range(4))
    return Batch(
        blocks,
        torch.cat([s.last[s.prompt_len : -1] for s, _, _ in parts]),
        torch.cat([s.lse[s.prompt_len : -1] for s, _, _ in parts]),
        previous_ids,
        label_ids,
        law_rows,
        weights,
    )
