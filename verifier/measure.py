"""Times real verify steps for the cost curve, and their matrix products alone for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from scheduler.ports import ROWS_PER_REQUEST
from scheduler.wire import Extension, Plan, SamplingParams
from verifier.runner import TargetRunner
from verifier.turns import median_seconds, median_table


def step_seconds(
    runner: TargetRunner,
    num_tokens: Sequence[int],
    context_lens: Sequence[int],
    rows_per_request: int = ROWS_PER_REQUEST,
) -> list[list[float]]:
    """[contexts][tokens] median seconds of a whole verify step: packing, forward, head on every row, greedy acceptance.

    Rows are spread over requests of up to rows_per_request. Each reads blocks of its own, as real ones do, as far as there are
    so many; only block 0 is written.
    """
    longest = runner.max_model_len - rows_per_request
    works = [
        [_step(runner, n, max(0, min(context_len, longest)), rows_per_request) for n in num_tokens]
        for context_len in context_lens
    ]
    try:
        return median_table(works, runner.device)
    finally:
        runner.kv.clear_padding()


def _step(runner: TargetRunner, num_tokens: int, context_len: int, rows_per_request: int) -> Callable[[], object]:
    plan = synthetic_plan(
        num_tokens,
        context_len,
        runner.kv.block_size,
        rows_per_request=rows_per_request,
        num_blocks=runner.kv.num_blocks,
        capture=bool(runner.capture),
    )
    return lambda: runner.verify(plan)


@torch.inference_mode()
def product_seconds(runner: TargetRunner, num_tokens: Sequence[int]) -> list[float]:
    """Median seconds of all matrix products of a step, one after the other, and nothing else."""
    return median_seconds([_products(runner, n) for n in num_tokens], runner.device)


def _products(runner: TargetRunner, num_tokens: int) -> Callable[[], object]:
    head, layers = runner.model.lm_head, runner.model.stack.products(num_tokens)
    rows = torch.ones(num_tokens, head.in_features, dtype=runner.dtype, device=runner.device)

    def run() -> None:
        layers()
        head(rows)

    return run


def synthetic_plan(
    num_tokens: int, context_len: int, block_size: int, *, rows_per_request: int, num_blocks: int, capture: bool
) -> Plan:
    """`num_tokens` greedy rows over requests of up to rows_per_request rows, each with `context_len` tokens before them.

    The context is read from blocks 1, 2, ... and from the first again when they are used up; rows are written to block 0.
    """
    num_read = context_len // block_size
    extensions = []
    for number, first in enumerate(range(0, num_tokens, rows_per_request)):
        n = min(rows_per_request, num_tokens - first)
        block_ids = np.zeros(-(-(context_len + n) // block_size), dtype=np.int32)
        block_ids[:num_read] = 1 + (number * num_read + np.arange(num_read)) % (num_blocks - 1) if num_blocks > 1 else 0
        extensions.append(
            Extension(
                request_id=str(first),
                start=context_len,
                token_ids=np.ones(n, dtype=np.int32),
                num_draft=n - 1,
                samples=True,
                block_ids=block_ids,
                params=SamplingParams(temperature=0.0),
                output_index=0,
            )
        )
    return Plan(step=0, extensions=tuple(extensions), capture=capture)
