"""Steps timed for the cost curve read as real ones do, and leave the cache as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conftest import save_target
from verifier.config import VerifierConfig
from verifier.measure import step_seconds, synthetic_plan
from verifier.runner import TargetRunner


@pytest.mark.parametrize(("rows_per_request", "num_requests"), [(8, 2), (1, 16), (16, 1)])
def test_each_request_reads_blocks_of_its_own_and_writes_none_of_them(rows_per_request: int, num_requests: int) -> None:
    plan = synthetic_plan(16, 100, 16, rows_per_request=rows_per_request, num_blocks=200, capture=False)
    assert len(plan.extensions) == num_requests and plan.num_tokens == 16
    read = np.concatenate([e.block_ids[: e.start // 16] for e in plan.extensions])
    assert len(set(read.tolist())) == len(read) == 6 * num_requests and read.min() == 1
    for extension in plan.extensions:
        written = range(extension.start // 16, (extension.start + len(extension.token_ids) - 1) // 16 + 1)
        assert all(extension.block_ids[block] == 0 for block in written)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_small_cache_is_read_again_and_again(num_blocks: int) -> None:
    plan = synthetic_plan(16, 100, 16, rows_per_request=1, num_blocks=num_blocks, capture=False)
    assert max(int(e.block_ids.max()) for e in plan.extensions) == num_blocks - 1


def test_what_the_cache_holds_of_requests_stays(tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama")
    runner = TargetRunner(
        VerifierConfig(str(folder), dtype="float32", device="cpu", num_blocks=12, num_threads=1, max_model_len=128)
    )
    runner.kv.pool[:, 1:] = torch.randn_like(runner.kv.pool[:, 1:])
    before = runner.kv.pool.clone()
    for rows_per_request in (1, 8):
        seconds = step_seconds(runner, [1, 4, 20], [16, 64], rows_per_request)
        assert np.shape(seconds) == (2, 3) and np.min(seconds) > 0
    assert torch.equal(runner.kv.pool, before)
