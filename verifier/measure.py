"""Times real verify steps for the cost curve, and their matrix products alone for comparison."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from scheduler.wire import Extension, Plan, SamplingParams
from verifier.runner import TargetRunner

_REPEATS = 7
_SLOW_S = 0.05  # steps longer than this are repeated less: what disturbs a timing is short
_SLOW_REPEATS = 3
_ROWS_PER_REQUEST = 8


def step_seconds(runner: TargetRunner, num_tokens: Sequence[int], context_lens: Sequence[int]) -> list[list[float]]:
    """[contexts][tokens] median seconds of a whole verify step: packing, forward, head on every row, greedy acceptance.

    Rows are spread over requests of up to 8, as drafts are. Uses block 0 only.
    """
    longest = runner.max_model_len - _ROWS_PER_REQUEST
    try:
        return [[_step(runner, n, max(0, min(context, longest))) for n in num_tokens] for context in context_lens]
    finally:
        runner.kv.clear_padding()


def _step(runner: TargetRunner, num_tokens: int, context_len: int) -> float:
    plan = synthetic_plan(num_tokens, context_len, runner.kv.block_size, capture=bool(runner.capture))
    return _median(lambda: runner.verify(plan), runner.device)


@torch.inference_mode()
def product_seconds(runner: TargetRunner, num_tokens: Sequence[int]) -> list[float]:
    """Median seconds of all matrix products of a step, one after the other, and nothing else."""
    return [_products(runner, n) for n in num_tokens]


def _products(runner: TargetRunner, num_tokens: int) -> float:
    head, layers = runner.model.lm_head, runner.model.stack.products(num_tokens)
    rows = torch.ones(num_tokens, head.in_features, dtype=runner.dtype, device=runner.device)

    def run() -> None:
        layers()
        head(rows)

    return _median(run, runner.device)


def _median(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    slow = time.perf_counter() - begin > _SLOW_S
    seconds = []
    for _ in range(_SLOW_REPEATS if slow else _REPEATS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def synthetic_plan(num_tokens: int, context_len: int, block_size: int, *, capture: bool) -> Plan:
    """`num_tokens` greedy rows over requests of up to 8 rows, each with `context_len` tokens before them, all in block 0."""
    extensions = []
    for first in range(0, num_tokens, _ROWS_PER_REQUEST):
        n = min(_ROWS_PER_REQUEST, num_tokens - first)
        extensions.append(
            Extension(
                request_id=str(first),
                start=context_len,
                token_ids=np.ones(n, dtype=np.int32),
                num_draft=n - 1,
                samples=True,
                block_ids=np.zeros(-(-(context_len + n) // block_size), dtype=np.int32),
                params=SamplingParams(temperature=0.0),
                output_index=0,
            )
        )
    return Plan(step=0, extensions=tuple(extensions), capture=capture)
