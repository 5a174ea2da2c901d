"""What a verify step hands to the drafter: the target's hidden states of the rows that were committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CommittedFeatures:
    """n committed rows of one verify step.

    features [n, m * d]: raw outputs of the captured layers, concatenated in the order asked for. slots, positions [n] int64:
    where the rows stand in the paged caches and in their requests. token_ids [n] int64: the token of each row.
    previous_slots [n] int64: where the row before it stands, 0 for a request's first. (These two are for drafters that pair
    a token with the state before it; others need none.) A row says nothing of which request it is: the block table does.
    4 KiB to 8 KiB a row for the demo target.
    """

    features: Tensor
    slots: Tensor
    positions: Tensor
    token_ids: Tensor | None = None
    previous_slots: Tensor | None = None


def merged(messages: Sequence[CommittedFeatures]) -> Sequence[CommittedFeatures]:
    """One message for those that piled up, which costs little more than one of them, unless two write the same slot."""
    if len(messages) < 2:
        return messages
    slots = torch.cat([m.slots for m in messages])
    if len(slots.unique()) < len(slots):
        return messages
    columns: dict[str, Any] = {}
    for field in fields(CommittedFeatures):
        parts = [getattr(m, field.name) for m in messages]
        columns[field.name] = None if parts[0] is None else torch.cat(parts)
    return [CommittedFeatures(**columns)]
