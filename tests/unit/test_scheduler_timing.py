"""What timed requests are told of their steps: offsets that tile their life, sums that are the steps', nothing for others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from scheduler.timing import StepSeconds, Timekeeper
from scheduler.wire import Delta, DraftAsk, FinishReason, Plan
from tests.unit.scheduler_toys import ToyDrafter, ToyVerifier, always
from tests.unit.test_scheduler_actor import CONFIG, Reader, request, serving

VERIFY_S, DRAFT_S = 0.01, 0.006


async def slow_verify(_: Plan) -> None:
    await asyncio.sleep(VERIFY_S)


async def slow_draft(_: list[DraftAsk]) -> None:
    await asyncio.sleep(DRAFT_S)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_timed_requests_steps_tile_its_life_and_add_up(depth: int, in_virtual_time: None) -> None:
    verifier = ToyVerifier(before_verify=slow_verify)
    drafter = ToyDrafter(verifier, knows=always, before_propose=slow_draft)
    config = replace(CONFIG, planner="fixed:3", prefill_chunk=4, pipeline_depth=depth)
    async with serving(verifier, drafter, config) as actor:
        reader = Reader(actor)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await actor.submit(request("timed", max_tokens=20, timed=True))
        await actor.submit(request("plain", max_tokens=20))
        await reader.ending("timed")
        took_s = loop.time() - began_s
        await reader.ending("plain")
        assert actor._loop is not None and len(actor._loop.times) == 0
    assert all(delta.times is None for delta in reader.of("plain"))
    first, *rounds = [delta.times for delta in reader.of("timed")]
    assert first is not None and first.num_steps >= 2, "a prompt of 8 in chunks of 4"
    assert first.verify_s >= first.num_steps * VERIFY_S
    last_s = first.ended_s
    assert 0.0 <= first.began_s < first.ended_s
    for times in rounds:
        assert times is not None and times.num_steps == 1
        assert times.verify_s >= VERIFY_S and (depth == 2 or times.draft_s >= DRAFT_S)
        assert times.ended_s > last_s, "steps of one request follow each other"
        parts_s = times.draft_s + times.plan_s + times.verify_s + times.apply_s
        assert depth == 2 or parts_s == pytest.approx(times.ended_s - times.began_s, abs=1e-3)
        last_s = times.ended_s
    assert last_s <= took_s + 1e-3


async def test_a_request_that_is_cancelled_or_fails_leaves_no_open_sums(in_virtual_time: None) -> None:
    verifier = ToyVerifier(before_verify=slow_verify)
    async with serving(verifier, None, replace(CONFIG, planner="off")) as actor:
        reader = Reader(actor)
        await actor.submit(request("gone", max_tokens=100, timed=True))
        await actor.submit(request("late", max_tokens=100, timed=True, timeout_s=0.1))
        await asyncio.sleep(0.05)
        await actor.cancel("gone")
        assert (await reader.ending("gone")).finish_reason is FinishReason.CANCELLED
        assert (await reader.ending("late")).finish_reason is FinishReason.ERROR
        assert actor._loop is not None and len(actor._loop.times) == 0


def test_deltas_without_a_step_of_their_own_carry_no_times() -> None:
    keeper, step = Timekeeper(), StepSeconds(10.0, 11.0, 0.1, 0.1, 0.7, 0.1)
    waiting = Delta("r", ())
    deltas = [waiting]
    assert keeper.stamp(deltas) is deltas, "nobody is timed: nothing is copied"
    keeper.begin("r", 9.0)
    keeper.note(Plan(1, ()), step)
    assert keeper.stamp(deltas) == deltas
    ending = replace(waiting, finish_reason=FinishReason.CANCELLED)
    assert keeper.stamp([ending]) == [ending] and len(keeper) == 0


@pytest.mark.parametrize(
    ("module", "unknown"),
    [
        ("scheduler.actor", "opentelemetry"),
        # fastapi itself imports the interface; what collects and sends must not be there while tracing is off
        ("services.gateway.app", "opentelemetry.sdk"),
    ],
)
def test_opentelemetry_is_imported_only_where_traces_are_sent(module: str, unknown: str) -> None:
    program = f"import sys, {module}; assert not [m for m in sys.modules if m.startswith('{unknown}')]"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
