"""Which sequences come next, and which blocks of them: the plan of a batch, made without looking at any state.

Owns the order of the data and the split between training and held-out prompts. Every process of a data-parallel run draws the
whole plan with the same generator and computes its own part, so that a run may be resumed with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.train.blocks import Batch, answer_ends, build_batch, draw_anchors
from drafter.train.loss import slot_weights
from drafter.train.states import Spans, States, StatesSource
from scheduler.errors import SettingsError

# How far ahead a source is told what will be read: enough to fill a pass of the target.
_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Visit:
    """One sequence of a batch. anchors: [A] where its blocks start; length: slots of each."""

    name: str
    spans: Spans
    anchors: Tensor
    length: int

    def weight(self, decay: float) -> float:
        """Sum of the weights of its slots inside the answers."""
        targets = self.anchors.unsqueeze(1) + torch.arange(1, self.length + 1)
        inside = targets < answer_ends(self.spans, self.anchors).unsqueeze(1)
        return float((slot_weights(self.length, decay) * inside).sum())


class DataOrder:
    """An epoch is every training sequence known at its start, shuffled; sequences written meanwhile join the next one. The
    order itself is part of the saved state, so that resuming continues exactly."""

    def __init__(self, source: StatesSource, held_out_every: int, generator: torch.Generator) -> None:
        self.source, self.every, self.generator = source, held_out_every, generator
        self.epoch, self.at = -1, 0
        self.order: list[str] = []

    def next(self) -> str:
        if self.at >= len(self.order):
            self._new_epoch()
        self.at += 1
        return self.order[self.at - 1]

    def _new_epoch(self) -> None:
        self.source.refresh()
        names = [name for name, meta in self.source.named() if not held_out(meta, self.every)]
        if not any(max(end - start for start, end in self.source.spans(name)) > 1 for name in names):
            raise SettingsError(f"{self.source.where} holds no sequence to train on beside the held-out ones")
        permutation = torch.randperm(len(names), generator=self.generator).tolist()
        self.order, self.at, self.epoch = [names[i] for i in permutation], 0, self.epoch + 1

    def draw(self, num_slots: int, anchors_per_sequence: int, width: int, variable: bool) -> list[Visit]:
        """Whole sequences until `num_slots` is reached. variable: block lengths 1..width, one drawn per sequence."""
        visits: list[Visit] = []
        drawn = 0
        while drawn < num_slots:
            name = self.next()
            spans = self.source.spans(name)
            if max(end - start for start, end in spans) < 2:
                continue
            anchors = draw_anchors(spans, anchors_per_sequence, self.generator)
            length = int(torch.randint(1, width + 1, (1,), generator=self.generator)) if variable else width
            visits.append(Visit(name, spans, anchors, length))
            drawn += len(anchors) * length
        return visits

    def load(self, visits: Sequence[Visit], decay: float) -> Batch:
        names = [visit.name for visit in visits]
        parts = []
        for index, visit in enumerate(visits):
            self.source.upcoming(names[index : index + _AHEAD])
            parts.append((self.source.read_named(visit.name), visit.anchors, visit.length))
        return build_batch(parts, decay)

    def held_out_sequences(self, limit: int) -> Iterator[States]:
        names = sorted(name for name, meta in self.source.named() if held_out(meta, self.every))[:limit]
        for index, name in enumerate(names):
            self.source.upcoming(names[index : index + _AHEAD])
            yield self.source.read_named(name)


def held_out(meta: dict[str, Any], every: int) -> bool:
    return every > 0 and int(meta["prompt_id"][:8], 16) % every == 0
