"""Two cohorts in flight: one drafts while the other is verified, and nothing else is different."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from scheduler.admit import parse_planner
from scheduler.drafting import Drafting
from scheduler.errors import DrafterLost, VerifierLost
from scheduler.live import Live, new_live
from scheduler.throughput import CostCurve, CurvePoints
from scheduler.wire import DraftAsk, DrafterInfo, FinishReason, Plan, Request, SamplingParams
from tests.unit.scheduler_toys import ToyDrafter, ToyVerifier, plain, sometimes
from tests.unit.test_scheduler_actor import CONFIG, PROMPT, Reader, greedy, request, serving

pytestmark = pytest.mark.usefixtures("in_virtual_time")

DEEP = replace(CONFIG, pipeline_depth=2, planner="fixed:3")


class Watch:
    """When each worker was busy, and with whom."""

    def __init__(self, *, verify_s: float = 0.004, draft_s: float = 0.003) -> None:
        self.verify_s, self.draft_s = verify_s, draft_s
        self.verifies: list[tuple[float, float, set[str]]] = []
        self.drafts: list[tuple[float, float, set[str]]] = []

    async def verify(self, plan: Plan) -> None:
        began = time.monotonic()
        await asyncio.sleep(self.verify_s)
        self.verifies.append((began, time.monotonic(), {e.request_id for e in plan.extensions}))

    async def draft(self, asks: Sequence[DraftAsk]) -> None:
        began = time.monotonic()
        await asyncio.sleep(self.draft_s)
        if asks:
            self.drafts.append((began, time.monotonic(), {ask.request_id for ask in asks}))

    def overlaps(self) -> list[tuple[set[str], set[str]]]:
        """Who drafted while who was verified."""
        return [
            (drafted, verified)
            for began, ended, drafted in self.drafts
            for start, stop, verified in self.verifies
            if min(ended, stop) - max(began, start) > 5e-4
        ]


def watched(watch: Watch, **settings: object) -> tuple[ToyVerifier, ToyDrafter]:
    verifier = ToyVerifier(before_verify=watch.verify, **settings)  # type: ignore[arg-type]
    return verifier, ToyDrafter(verifier, knows=sometimes, before_propose=watch.draft)


def prompt_of(i: int) -> tuple[int, ...]:
    return (*PROMPT, i, i + 1)


def text_of(i: int, max_tokens: int) -> list[int]:
    return plain(list(prompt_of(i)), greedy(max_tokens=max_tokens))


async def test_one_cohort_drafts_while_the_other_is_verified_and_the_text_is_the_same() -> None:
    watch = Watch()
    verifier, drafter = watched(watch, num_blocks=200)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(8):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=10 + 3 * i))
        for i in range(8):
            await reader.ending(f"r{i}")
            assert reader.output(f"r{i}") == text_of(i, 10 + 3 * i)
    assert not drafter.faults
    together = watch.overlaps()
    assert len(together) > 10
    assert all(not drafted & verified for drafted, verified in together), "nobody is in both cohorts at once"
    sizes = [len(verified) for _, _, verified in watch.verifies]
    assert max(sizes[3:12]) <= 5, "the cohorts are halves"


async def test_a_single_request_is_served_in_one_cohort() -> None:
    watch = Watch()
    verifier, drafter = watched(watch)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        await actor.submit(request("r", max_tokens=30))
        await reader.ending("r")
    assert reader.output("r") == plain(list(PROMPT), greedy(max_tokens=30))
    assert not watch.overlaps()


async def test_requests_that_come_while_a_step_is_in_flight_join_the_smaller_cohort() -> None:
    watch = Watch()
    verifier, drafter = watched(watch, num_blocks=200)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(12):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=25))
            await asyncio.sleep(0.004)
        for i in range(12):
            await reader.ending(f"r{i}")
            assert reader.output(f"r{i}") == text_of(i, 25)
    assert not drafter.faults
    assert len(watch.overlaps()) > 10


async def test_a_pool_that_is_too_small_preempts_across_cohorts_and_loses_nothing() -> None:
    watch = Watch(verify_s=0.001, draft_s=0.001)
    verifier, drafter = watched(watch, num_blocks=22)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(8):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=30))
        for i in range(8):
            await reader.ending(f"r{i}")
            assert reader.output(f"r{i}") == text_of(i, 30)
        assert (await actor.snapshot()).num_preemptions > 0
        assert (await actor.snapshot()).kv_blocks_used == 0
    assert not drafter.faults


@pytest.mark.parametrize("seed", range(6))
async def test_workers_that_fail_in_flight_cost_time_but_no_token(seed: int) -> None:
    random = Random(seed)

    async def verify(_plan: Plan) -> None:
        await asyncio.sleep(0.001)
        if random.random() < 0.06:
            raise VerifierLost("for a test")

    async def draft(_asks: Sequence[DraftAsk]) -> None:
        await asyncio.sleep(0.001 * random.random())
        if random.random() < 0.06:
            raise DrafterLost("for a test")

    verifier = ToyVerifier(num_blocks=200, before_verify=verify)
    drafter = ToyDrafter(verifier, knows=sometimes, before_propose=draft)
    async with serving(verifier, drafter, replace(DEEP, planner="auto")) as actor:
        reader = Reader(actor)
        for i in range(8):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=20))
        for i in range(8):
            ending = await reader.ending(f"r{i}")
            if ending.finish_reason is not FinishReason.ERROR:  # three failures in a row fail the requests of that step
                assert reader.output(f"r{i}") == text_of(i, 20)
        assert (await actor.snapshot()).kv_blocks_used == 0
        await actor.submit(request("after", max_tokens=5))
        assert (await reader.ending("after")).finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
    assert not drafter.faults


@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_requests_end_once_and_the_others_go_on(seed: int) -> None:
    random = Random(seed)
    watch = Watch(verify_s=0.002, draft_s=0.002)
    verifier, drafter = watched(watch, num_blocks=200)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(10):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=30))
        for i in random.sample(range(10), 5):
            await asyncio.sleep(0.003 * random.random())
            await actor.cancel(f"r{i}")
        for i in range(10):
            ending = await reader.ending(f"r{i}")
            if ending.finish_reason is FinishReason.LENGTH:
                assert reader.output(f"r{i}") == text_of(i, 30)
            else:
                assert ending.finish_reason is FinishReason.CANCELLED
        assert (await actor.snapshot()).kv_blocks_used == 0


async def test_planners_and_deadlines_change_between_steps_in_flight() -> None:
    watch = Watch(verify_s=0.002, draft_s=0.002)
    verifier, drafter = watched(watch, num_blocks=200)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(6):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=60))
        await actor.submit(request("late", max_tokens=100, timeout_s=0.05))
        for planner in ("off", "auto", "algorithm1", "off", "fixed:2"):
            await asyncio.sleep(0.01)
            await actor.set_planner(planner)
        assert (await reader.ending("late")).error is not None
        for i in range(6):
            await reader.ending(f"r{i}")
            assert reader.output(f"r{i}") == text_of(i, 60)
    assert not drafter.faults


async def test_stopping_with_a_step_in_flight_ends_everyone() -> None:
    watch = Watch(verify_s=0.02)
    verifier, drafter = watched(watch, num_blocks=200)
    async with serving(verifier, drafter, DEEP) as actor:
        reader = Reader(actor)
        for i in range(4):
            await actor.submit(request(f"r{i}", prompt=prompt_of(i), max_tokens=60))
        await reader.until(lambda: all(reader.output(f"r{i}") for i in range(4)))
    for i in range(4):
        assert (await reader.ending(f"r{i}")).error is not None


def curve_of(verify_s: Callable[[int], float], draft_s: Callable[[int], float]) -> CostCurve:
    tokens, requests = (1, 8, 64, 512), (1, 4, 16, 64)
    return CostCurve(
        CurvePoints(
            tokens=tokens,
            contexts=(256,),
            verify_s=(tuple(verify_s(n) for n in tokens),),
            requests=requests,
            widths=(1, 7),
            draft_s=tuple((draft_s(n), draft_s(n)) for n in requests),
        ),
        measured_at=0.0,
    )


def decoding(count: int) -> list[Live]:
    lives = []
    for i in range(count):
        live = new_live(Request(f"r{i}", (1, 2), SamplingParams()), now=0.0, deadline_s=1e9, block_size=4)
        live.append(3)
        live.num_computed = 2
        lives.append(live)
    return lives


def test_two_cohorts_are_formed_where_verifying_costs_by_the_token_and_not_where_it_costs_by_the_step() -> None:
    info = DrafterInfo("toy", 7, True, True, 4096, (1,), "x")

    def pays(
        verify_s: Callable[[int], float], draft_s: Callable[[int], float], count: int = 16, planner: str = "fixed:3"
    ) -> bool:
        return Drafting(parse_planner(planner), info, curve_of(verify_s, draft_s), 64).overlap_pays(decoding(count))

    by_token = lambda n: 0.001 * n  # noqa: E731
    by_step = lambda n: 0.02 + 1e-5 * n  # noqa: E731
    assert pays(by_token, lambda n: 0.0015 * n)
    assert not pays(by_token, lambda n: 0.0015 * n, count=1)
    assert not pays(by_step, lambda n: 0.005), "two steps for half as many each take nearly twice as long"
    assert not pays(by_token, lambda n: 0.0001), "a draft that takes no time need not be hidden"
    assert not pays(by_token, lambda n: 0.0015 * n, planner="auto"), "plain decoding, which it may do, is as good"
