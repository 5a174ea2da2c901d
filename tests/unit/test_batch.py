"""Packing a plan into flat rows, against the same a position at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.wire import Extension, Plan, SamplingParams
from verifier.batch import pack

BLOCK_SIZE = 4


def some_extension(rng: np.random.Generator, name: str) -> Extension:
    start = int(rng.choice([0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, rng.integers(0, 40)]))
    count = int(rng.integers(1, 12))
    # a table may be longer than the rows that are there so far
    num_blocks = -(-(start + count) // BLOCK_SIZE) + int(rng.integers(0, 3))
    return Extension(
        request_id=name,
        start=start,
        token_ids=rng.integers(0, 99, count).astype(np.int32),
        num_draft=int(rng.integers(0, count)),
        samples=bool(rng.integers(0, 2)),
        block_ids=rng.permutation(500)[:num_blocks].astype(np.int32),
        params=SamplingParams(temperature=0.0),
        output_index=0,
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_row_has_the_slot_of_its_position_and_of_the_one_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = Plan(1, tuple(some_extension(rng, str(i)) for i in range(int(rng.integers(1, 9)))), capture=True)
    batch = pack(plan, BLOCK_SIZE, torch.device("cpu"))

    def slot(extension: Extension, position: int) -> int:
        return int(extension.block_ids[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    rows = [(e, e.start + i) for e in plan.extensions for i in range(len(e.token_ids))]
    assert batch.positions.tolist() == [position for _, position in rows]
    assert batch.slots.tolist() == [slot(e, position) for e, position in rows]
    assert batch.previous_slots.tolist() == [slot(e, p - 1) if p else 0 for e, p in rows]
