"""What a step costs the host: with drafts and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.pricing import Pricing, StepLoad
from scheduler.stats import StepStats
from tests.unit.scheduler_toys import flat_curve

PLAIN = StepStats(
    step=0, num_tokens=4, num_prefill_tokens=0, num_rounds=4, num_drafting=0, width=0, num_drafted=0, verified_lengths=(0,) * 4,
    accepted_lengths=(0,) * 4, num_round_tokens=4, num_emitted=4, gate_shut=False, predicted_s=None, plan_s=2e-4, apply_s=2e-4,
)  # fmt: skip


@pytest.fixture
def prices() -> Pricing:
    return Pricing(flat_curve())


def observe(prices: Pricing, step: StepStats, times: int) -> None:
    for _ in range(times):
        prices.observe(step)


def test_what_drafts_cost_the_host_is_part_of_their_price_and_of_no_plain_step(prices):
    drafting = replace(PLAIN, plan_s=1.1e-3, apply_s=5e-4, num_drafting=3, width=4)
    before = prices.draft_table(4, 4, verify_s=0.01).copy()
    observe(prices, drafting, 200)
    assert (prices.host_s, prices.draft_host_s) == (pytest.approx(1.6e-3, rel=1e-2), 0.0), "no plain step was seen yet"
    for _ in range(200):
        prices.observe(PLAIN)
        prices.observe(drafting)
    assert prices.host_s == pytest.approx(4e-4, rel=1e-2)
    assert prices.draft_host_s == pytest.approx(1.2e-3, rel=1e-2)
    added = prices.draft_table(4, 4, verify_s=0.01) - before
    np.testing.assert_allclose(added, np.where(before > 0, prices.draft_host_s, 0.0))
    load = StepLoad(num_rounds=4, num_prefill=0, context_len=10.0, kv_tokens=40.0)
    with_draft, without = (prices.step_seconds(load, 0, 2, draft_s=s) for s in (1e-3, 0.0))
    np.testing.assert_allclose(with_draft - without, 1e-3 + prices.draft_host_s)


def test_a_clock_that_jumps_is_no_work_of_the_host(prices):
    observe(prices, PLAIN, 100)
    observe(prices, replace(PLAIN, plan_s=3600.0), 1)
    observe(prices, replace(PLAIN, plan_s=-3600.0), 1)
    assert 0.0 <= prices.host_s < 1e-3
