"""The whole scheduler as its callers see it: submit, stream, cancel, workers that die, health, drain."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from scheduler import links
from scheduler.actor import SchedulerActor
from scheduler.config import SchedulerConfig
from scheduler.errors import (
    BadParams,
    DrafterLost,
    InternalFault,
    Overloaded,
    SettingsError,
    ShuttingDown,
    TooLong,
    VerifierLost,
)
from scheduler.links import DrafterLink, VerifierLink
from scheduler.proposals import DraftCall
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, FinishReason, Plan, Request, SamplingParams, Verdict
from tests.unit.scheduler_toys import Committed, ToyDrafter, ToyVerifier, always, never, plain

pytestmark = pytest.mark.usefixtures("in_virtual_time")

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
CONFIG = SchedulerConfig(
    planner="fixed:5", check_integrity=True, worker_timeout_s=1.0, recover_timeout_s=2.0, stall_timeout_s=1.0
)


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]


def request(name: str, *, prompt: Sequence[int] = PROMPT, max_tokens: int = 20, **rest: object) -> Request:
    return Request(name, tuple(prompt), greedy(max_tokens=max_tokens), subscriber="gw", **rest)  # type: ignore[arg-type]


@dataclass
class Reader:
    """Collects a subscription in the background."""

    actor: SchedulerActor
    subscriber: str = "gw"
    lists: list[list[Delta]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = self.actor.subscribe(self.subscriber)
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for deltas in self.stream:
            self.lists.append(deltas)
            self.changed.set()

    def of(self, name: str) -> list[Delta]:
        return [d for deltas in self.lists for d in deltas if d.request_id == name]

    def output(self, name: str) -> list[int]:
        return [token for delta in self.of(name) for token in delta.token_ids]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ending(self, name: str) -> Delta:
        await self.until(lambda: any(d.finish_reason is not None for d in self.of(name)))
        last = [d for d in self.of(name) if d.finish_reason is not None]
        assert len(last) == 1
        return last[0]

    async def endings(self, *names: str) -> list[Delta]:
        return [await self.ending(name) for name in names]


@asynccontextmanager
async def serving(
    verifier: ToyVerifier, drafter: ToyDrafter | None, config: SchedulerConfig = CONFIG, **rest: object
) -> AsyncIterator[SchedulerActor]:
    rest.setdefault("clock", lambda: time.monotonic())  # read late: it may be virtual
    actor = SchedulerActor(config, verifier, drafter, **rest)  # type: ignore[arg-type]
    await actor.start()
    try:
        yield actor
    finally:
        await actor.stop()


async def snapshot_where(actor: SchedulerActor, condition: Callable[[SchedulerStats], bool]) -> SchedulerStats:
    for _ in range(2000):
        stats = await actor.snapshot()
        if condition(stats):
            return stats
        await asyncio.sleep(0.002)
    raise AssertionError(f"never came true: {stats}")


def toys(**settings: object) -> tuple[ToyVerifier, ToyDrafter]:
    verifier = ToyVerifier(**settings)  # type: ignore[arg-type]
    return verifier, ToyDrafter(verifier)


# -- streaming --


async def test_requests_stream_the_plain_text_with_one_list_per_step() -> None:
    verifier, drafter = toys(num_blocks=100)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        names = [f"r{i}" for i in range(8)]
        for i, name in enumerate(names):
            await actor.submit(request(name, prompt=[i, *PROMPT]))
        await reader.endings(*names)
        for i, name in enumerate(names):
            assert reader.output(name) == plain([i, *PROMPT], greedy(max_tokens=20))
        for deltas in reader.lists:
            assert len({d.request_id for d in deltas}) == len(deltas), "one delta per request and step"
        assert any(len(deltas) > 1 for deltas in reader.lists)
        assert (await actor.snapshot()).num_live == 0


async def test_deltas_are_kept_for_a_subscriber_that_comes_late() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter) as actor:
        await actor.submit(request("r"))
        await snapshot_where(actor, lambda stats: stats.finished.get("length") == 1)
        reader = Reader(actor)
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))


async def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    verifier, drafter = toys(num_blocks=100)
    async with serving(verifier, drafter) as actor:
        slow = actor.subscribe("slow")
        reader = Reader(actor)
        await actor.submit(replace(request("s"), subscriber="slow"))
        await actor.submit(request("r"))
        await reader.ending("r")
        await snapshot_where(actor, lambda stats: stats.finished.get("length") == 2)
        tokens = [t for deltas in [await anext(slow) for _ in range(4)] for d in deltas for t in d.token_ids]
        assert plain(PROMPT, greedy(max_tokens=20))[: len(tokens)] == tokens
        await slow.aclose()


@pytest.mark.parametrize("how", ["close", "cancel the reader", "throw away", "the reader is known to be dead"])
async def test_an_abandoned_subscription_cancels_its_requests_and_no_others(how: str) -> None:
    verifier, drafter = toys(num_blocks=200, max_model_len=1000)
    async with serving(verifier, drafter) as actor:
        leaving, staying = Reader(actor, "leaving"), Reader(actor)
        await actor.submit(replace(request("l1", max_tokens=500), subscriber="leaving"))
        await actor.submit(replace(request("l2", max_tokens=500), subscriber="leaving"))
        await actor.submit(request("s", max_tokens=150))
        await leaving.until(lambda: bool(leaving.of("l1")))
        if how == "cancel the reader":
            leaving.task.cancel()
        elif how == "close":
            await leaving.stream.aclose()
        elif how == "the reader is known to be dead":
            actor.end_subscription("leaving")
            await asyncio.wait({leaving.task}, timeout=5)
            assert leaving.task.done() and not actor.is_subscribed("leaving")
            actor.end_subscription("leaving")
        else:
            leaving.task.cancel()
            stream = actor.subscribe("leaving")
            await actor.submit(replace(request("l3", max_tokens=500), subscriber="leaving"))
            del stream
            gc.collect()
        await staying.ending("s")
        stats = await actor.snapshot()
        assert stats.finished == {"cancelled": 3 if how == "throw away" else 2, "length": 1}
        assert stats.kv_blocks_used == 0


async def test_a_second_subscription_of_one_name_takes_over_without_cancelling() -> None:
    verifier, drafter = toys(num_blocks=200, max_model_len=600)
    async with serving(verifier, drafter) as actor:
        first = Reader(actor)
        await actor.submit(request("r", max_tokens=300))
        await first.until(lambda: bool(first.of("r")))
        second = Reader(actor)
        await asyncio.wait({first.task}, timeout=5)
        assert first.task.done()
        await second.ending("r")
        assert first.output("r") + second.output("r") == plain(PROMPT, greedy(max_tokens=300))


async def test_two_hundred_clients_that_drop_leave_nothing_behind() -> None:
    verifier, drafter = toys(num_blocks=400, max_model_len=400)
    config = replace(CONFIG, max_live=16, max_waiting=400, check_integrity=False)
    async with serving(verifier, drafter, config) as actor:
        reader = Reader(actor)
        for i in range(200):
            await actor.submit(request(f"r{i}", prompt=[i % 50, *PROMPT], max_tokens=200))
            if i % 3:
                await asyncio.sleep(0)
            await actor.cancel(f"r{i}")
            await actor.cancel(f"r{i}")
        await actor.submit(request("last"))
        await reader.ending("last")
        endings = [await reader.ending(f"r{i}") for i in range(200)]
        assert {e.finish_reason for e in endings} == {FinishReason.CANCELLED}
        stats = await actor.snapshot()
        assert (stats.num_live, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert actor._subscriber_of == {}


async def test_cancelling_what_is_not_there_does_nothing() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter) as actor:
        await actor.cancel("nobody")
        reader = Reader(actor)
        await actor.submit(request("r"))
        await reader.ending("r")
        await actor.cancel("r")


async def test_a_model_call_does_not_block_submit_cancel_and_snapshot() -> None:
    gate = asyncio.Event()

    async def wait(_plan: Plan) -> None:
        await gate.wait()

    verifier, drafter = toys(before_verify=wait)
    async with serving(verifier, drafter, replace(CONFIG, worker_timeout_s=30.0)) as actor:
        reader = Reader(actor)
        await actor.submit(request("a"))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(0.5):
            await actor.submit(request("b"))
            await actor.cancel("b")
            assert (await reader.ending("b")).finish_reason is FinishReason.CANCELLED
            await actor.cancel("a")
            assert (await actor.snapshot()).num_live == 1
        gate.set()
        assert (await reader.ending("a")).finish_reason is FinishReason.CANCELLED


# -- refusals --


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": ()}, "prompt"),
        ({"prompt_ids": (1, 50)}, "prompt"),
        ({"prompt_ids": (-1,)}, "prompt"),
        ({"request_id": ""}, "request_id"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"params": greedy(max_tokens=0)}, "max_tokens"),
        ({"params": greedy(max_tokens=4, min_tokens=5)}, "min_tokens"),
        ({"params": greedy(min_tokens=-1)}, "min_tokens"),
        ({"params": SamplingParams(temperature=-0.1)}, "temperature"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"params": SamplingParams(temperature=float("inf"))}, "temperature"),
        ({"params": SamplingParams(top_p=0.0)}, "top_p"),
        ({"params": SamplingParams(top_p=5e-324)}, "top_p"),
        ({"params": SamplingParams(top_p=1.1)}, "top_p"),
        ({"params": SamplingParams(top_k=-1)}, "top_k"),
        ({"params": SamplingParams(top_k=2**63)}, "top_k"),
        ({"params": SamplingParams(min_p=2.0)}, "min_p"),
        ({"params": SamplingParams(seed=2**64)}, "seed"),
        ({"params": greedy(stop_ids=(50,))}, "stop_token_ids"),
    ],
)
async def test_nonsense_is_refused_and_names_the_parameter(change: dict[str, object], param: str) -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter) as actor:
        with pytest.raises(BadParams) as refused:
            await actor.submit(replace(request("r"), **change))  # type: ignore[arg-type]
        assert refused.value.param == param
        assert "\n" not in str(refused.value)
        assert (await actor.snapshot()).num_waiting == 0


async def test_too_long_and_too_many_are_refused() -> None:
    verifier, drafter = toys(max_model_len=64)
    async with serving(verifier, drafter, replace(CONFIG, max_live=1, max_waiting=1)) as actor:
        with pytest.raises(TooLong):
            await actor.submit(request("long", max_tokens=60))
        await actor.submit(request("a"))
        await actor.submit(request("b"))
        with pytest.raises(Overloaded) as refused:
            await actor.submit(request("c"))
        assert refused.value.retry_after_s > 0
        assert (await actor.snapshot()).rejected == {"TooLong": 1, "Overloaded": 1}
        reader = Reader(actor)
        await reader.endings("a", "b")


async def test_nothing_is_taken_before_start_and_after_drain() -> None:
    verifier, drafter = toys(verify_s=0.002)
    actor = SchedulerActor(CONFIG, verifier, drafter)
    with pytest.raises(ShuttingDown):
        await actor.submit(request("r"))
    await actor.start()
    reader = Reader(actor)
    await actor.submit(request("r"))
    draining = asyncio.create_task(actor.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await actor.submit(request("late"))
    assert await draining
    assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))
    await actor.stop()
    await asyncio.wait({reader.task}, timeout=5)
    assert reader.task.done() and not reader.task.cancelled()


async def test_stop_ends_what_runs_with_an_error() -> None:
    verifier, drafter = toys(max_model_len=500, num_blocks=200, verify_s=0.005)
    actor = SchedulerActor(CONFIG, verifier, drafter)
    await actor.start()
    reader = Reader(actor)
    await actor.submit(request("r", max_tokens=400))
    await reader.until(lambda: bool(reader.of("r")))
    assert not await actor.drain(0.02)
    await actor.stop()
    ending = await reader.ending("r")
    assert ending.error is not None and ending.error[0] == "ShuttingDown"


async def test_a_wrong_setting_refuses_to_start() -> None:
    verifier, drafter = toys()
    with pytest.raises(SettingsError, match="planner"):
        SchedulerActor(replace(CONFIG, planner="fastest"), verifier, drafter)


# -- workers that die --


async def test_a_lost_drafter_costs_no_token_and_is_used_again_when_it_is_back() -> None:
    verifier, drafter = toys(num_blocks=300, max_model_len=1000, verify_s=0.001)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        await actor.submit(request("old", max_tokens=300))
        await reader.until(lambda: any(d.num_drafted for d in reader.of("old")))
        drafter.die()
        await actor.submit(request("between", prompt=[2, *PROMPT], max_tokens=30))
        await reader.ending("between")
        assert not (await actor.snapshot()).drafter_alive
        drafter.dead = False
        await snapshot_where(actor, lambda stats: stats.drafter_alive)
        await actor.submit(request("new", max_tokens=30))
        await reader.endings("old", "new")
        assert reader.output("old") == plain(PROMPT, greedy(max_tokens=300))
        assert reader.output("between") == plain([2, *PROMPT], greedy(max_tokens=30))
        assert reader.output("new") == plain(PROMPT, greedy(max_tokens=30))
        assert sum(d.num_drafted for d in reader.of("between")) == 0
        assert sum(d.num_drafted for d in reader.of("new")) > 0
        assert any(d.num_drafted for d in reader.of("old")[-20:]), "it drafts again from what it computed since"
        assert (await actor.snapshot()).num_drafter_losses == 1
        assert not drafter.faults


@pytest.mark.parametrize("busy", [False, True])
async def test_a_drafter_that_dies_while_nobody_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """Of four deaths three were counted: the fourth was unnoticed until somebody asked for a draft."""
    monkeypatch.setattr(links, "_LOOK_S", 0.02)
    verifier, drafter = toys(num_blocks=500, max_model_len=2000, verify_s=0.001)
    async with serving(verifier, drafter, replace(CONFIG, planner="off")) as actor:
        reader = Reader(actor)
        if busy:
            await actor.submit(request("r", max_tokens=1500))
        for num_losses in (1, 2):
            drafter.die()
            stats = await snapshot_where(actor, lambda stats: not stats.drafter_alive)
            assert stats.num_drafter_losses == num_losses
            drafter.dead = False
            await snapshot_where(actor, lambda stats: stats.drafter_alive)
        if busy:
            await reader.ending("r")
            assert reader.output("r") == plain(PROMPT, greedy(max_tokens=1500))
        assert (await actor.snapshot()).num_drafter_losses == 2


@pytest.mark.parametrize("failure", ["raises", "hangs", "wrong answer", "cancelled"])
async def test_however_a_drafter_fails_requests_decode_on(failure: str) -> None:
    verifier, drafter = toys(num_blocks=100)
    failed = False

    async def fail(_asks: object) -> None:
        nonlocal failed
        if failed or not _asks:
            return
        failed = True
        if failure == "raises":
            raise RuntimeError("device-side assert")
        if failure == "hangs":
            await asyncio.sleep(3600)
        if failure == "cancelled":
            raise asyncio.CancelledError

    drafter.before_propose = fail
    if failure == "wrong answer":
        drafter.propose_now = lambda asks, width, features: []  # type: ignore[method-assign]
    async with serving(verifier, drafter, replace(CONFIG, worker_timeout_s=0.2)) as actor:
        reader = Reader(actor)
        await actor.submit(request("r"))
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))
        assert (await actor.snapshot()).num_drafter_losses >= 1


async def test_a_lost_verifier_is_waited_for_and_everyone_recomputed() -> None:
    verifier, drafter = toys(num_blocks=300, max_model_len=400, verify_s=0.001)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        for i in range(3):
            await actor.submit(request(f"r{i}", prompt=[i, *PROMPT], max_tokens=100))
        await reader.until(lambda: len(reader.output("r2")) > 10)
        verifier.die()
        await snapshot_where(actor, lambda stats: not stats.verifier_alive)
        await actor.submit(request("queued"))
        await actor.cancel("r1")
        verifier.dead = False
        await reader.endings("r0", "r1", "r2", "queued")
        assert reader.output("r0") == plain([0, *PROMPT], greedy(max_tokens=100))
        assert reader.output("r2") == plain([2, *PROMPT], greedy(max_tokens=100))
        assert (await reader.ending("r1")).finish_reason is FinishReason.CANCELLED
        assert reader.output("queued") == plain(PROMPT, greedy(max_tokens=20))
        stats = await actor.snapshot()
        assert stats.verifier_alive and stats.num_verifier_losses == 1
        assert not drafter.faults


async def test_what_a_dead_verifier_has_left_behind_is_not_handed_to_the_drafter() -> None:
    """Held while nobody drafted; reading it would fail, and cost the drafter for nothing."""

    deaths: list[int] = []

    def die_once(_plan: Plan) -> None:
        assert actor._loop is not None
        if not deaths and len(verifier.plans) > 40 and actor._loop.drafter.holds_features:
            deaths.append(len(verifier.plans))
            verifier.die()
            verifier.dead = False
            raise VerifierLost("the toy target died over its work")

    verifier, drafter = toys(before_verify=die_once)
    drafter.knows = never
    async with serving(verifier, drafter, replace(CONFIG, planner="algorithm1")) as actor:
        reader = Reader(actor)
        await actor.submit(request("r", max_tokens=100))
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=100))
        stats = await actor.snapshot()
        assert (stats.num_verifier_losses, stats.num_drafter_losses) == (1, 0)


async def test_a_verifier_that_stays_away_fails_its_requests_in_bounded_time() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter, replace(CONFIG, recover_timeout_s=0.2)) as actor:
        reader = Reader(actor)
        verifier.die()
        await actor.submit(request("a"))
        await actor.submit(request("b"))
        for ending in await reader.endings("a", "b"):
            assert ending.error is not None and ending.error[0] == "VerifierLost"
        verifier.dead = False
        await actor.submit(request("c"))
        assert (await reader.ending("c")).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("failure", ["raises", "hangs", "cancelled"])
async def test_a_request_that_breaks_every_step_ends_and_others_are_served(failure: str) -> None:
    async def fail(plan: Plan) -> None:
        if any(e.request_id == "poison" for e in plan.extensions):
            if failure == "hangs":
                await asyncio.sleep(3600)
            raise asyncio.CancelledError if failure == "cancelled" else RuntimeError("illegal access")

    verifier, drafter = toys(before_verify=fail)
    async with serving(verifier, drafter, replace(CONFIG, worker_timeout_s=0.1)) as actor:
        reader = Reader(actor)
        await actor.submit(request("poison"))
        ending = await reader.ending("poison")
        assert ending.error is not None
        assert ending.error[0] == ("VerifierLost" if failure == "hangs" else "InternalFault")
        await actor.submit(request("fine"))
        await reader.ending("fine")
        assert reader.output("fine") == plain(PROMPT, greedy(max_tokens=20))


async def test_a_long_prompt_that_breaks_its_last_chunk_ends_and_who_shares_its_steps_is_served() -> None:
    """Its first chunks succeed whenever it is computed anew, so that steps which succeed say nothing of it."""
    num_failures = 0

    def fail(plan: Plan) -> None:
        nonlocal num_failures
        if any(e.request_id == "poison" and e.samples for e in plan.extensions):
            num_failures += 1
            raise RuntimeError("illegal access")

    verifier, drafter = toys(before_verify=fail, num_blocks=100)
    async with serving(verifier, drafter, replace(CONFIG, prefill_chunk=8)) as actor:
        reader = Reader(actor)
        await actor.submit(request("fine", max_tokens=60))
        await actor.submit(request("poison", prompt=[5] * 40))
        ending = await asyncio.wait_for(reader.ending("poison"), 30)
        assert ending.error is not None and ending.error[0] == "InternalFault" and num_failures == 3
        await reader.ending("fine")
        assert reader.output("fine") == plain(PROMPT, greedy(max_tokens=60))


async def test_a_step_slower_than_the_timeout_is_waited_for_while_its_layers_advance() -> None:
    now = 0.0
    gate = asyncio.Event()

    async def crawl(_plan: Plan) -> None:
        nonlocal now
        while not gate.is_set():
            await asyncio.sleep(0.005)
            verifier.num_layers_done += 1
            now += 0.02

    verifier, drafter = toys(before_verify=crawl)
    config = replace(CONFIG, worker_timeout_s=0.1, stall_timeout_s=1.0)
    async with serving(verifier, drafter, config, clock=lambda: now) as actor:
        reader = Reader(actor)
        await actor.submit(request("r"))
        while now < 3.0:
            await asyncio.sleep(0.01)
            await actor.check_health()
        gate.set()
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))
        assert (await actor.snapshot()).num_verifier_losses == 0


@pytest.mark.parametrize("silent", ["stands still", "does not say"])
async def test_a_worker_that_hangs_is_lost_within_the_timeout_whether_or_not_it_still_answers(silent: str) -> None:
    class Stuck(ToyVerifier):
        async def verify(self, plan: Plan) -> tuple[list[Verdict], None]:
            await asyncio.sleep(3600)
            raise AssertionError

        async def progress(self) -> int:
            if silent == "does not say":
                await asyncio.sleep(3600)
            return 7

    link = VerifierLink(Stuck(), timeout_s=0.2, on_progress=lambda: None)
    began = time.monotonic()
    with pytest.raises(VerifierLost, match="no progress"):
        await link.verify(Plan(step=0, extensions=()))
    assert 0.15 < time.monotonic() - began < 2


async def test_a_curve_is_not_waited_for_when_the_worker_hangs_over_it() -> None:
    class Stuck(ToyVerifier):
        async def measure(
            self, num_tokens: Sequence[int], context_lens: Sequence[int], rows: int = 8
        ) -> list[list[float]]:
            await asyncio.sleep(3600)
            raise AssertionError

    verifier = Stuck()
    config = replace(CONFIG, planner="algorithm1", worker_timeout_s=0.1)
    async with asyncio.timeout(5), serving(verifier, ToyDrafter(verifier), config) as actor:
        assert not (await actor.snapshot()).curve_loaded


async def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    num_calls = 0

    def fail(_plan: Plan) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("out of memory")

    verifier, drafter = toys(before_verify=fail)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        await actor.submit(request("r"))
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))


async def test_a_deadline_passes_even_while_the_verifier_is_away() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter, replace(CONFIG, recover_timeout_s=30.0)) as actor:
        reader = Reader(actor)
        verifier.die()
        await actor.submit(request("r", timeout_s=0.2))
        ending = await reader.ending("r")
        assert ending.error is not None and ending.error[0] == "DeadlineExceeded"


async def test_a_fault_of_our_own_fails_what_it_touched_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, drafter = toys(num_blocks=100)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        await actor.submit(request("a", max_tokens=100))
        await reader.until(lambda: bool(reader.of("a")))
        assert actor._loop is not None
        tables = actor._loop.core.residency.tables
        tables.allocator.take(1)  # a leak
        ending = await reader.ending("a")
        assert ending.error is not None and ending.error[0] == "InternalFault"
        assert "counts 1 holders but has 0" in ending.error[1]
        await actor.submit(request("b"))
        await reader.ending("b")
        assert reader.output("b") == plain(PROMPT, greedy(max_tokens=20))
        await actor.check_health()


async def test_a_leak_is_found_when_idle_without_being_asked_for() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter, replace(CONFIG, check_integrity=False)) as actor:
        reader = Reader(actor)
        assert actor._loop is not None
        leaky = actor._loop.core.residency.tables
        leaky.allocator.take(1)
        await actor.submit(request("a"))
        await reader.ending("a")
        await asyncio.sleep(0.01)
        assert actor._loop.core.residency.tables is not leaky


async def test_a_lost_drafter_is_not_handed_what_it_should_have_absorbed_before() -> None:
    verifier, drafter = toys()
    drafter.die()
    woken = asyncio.Event()
    link = DrafterLink(drafter, timeout_s=1.0, clock=lambda: 0.0, wake=woken.set)
    link.hold(Committed((), verifier.life), 4)
    with pytest.raises(DrafterLost):
        await link.propose(DraftCall())
    link.hold(Committed((), verifier.life), 4)
    link.lose()
    assert link.lost and not link.holds_features
    assert link.take_return() is None
    drafter.dead = False
    await asyncio.wait_for(woken.wait(), 5)
    assert link.take_return() == drafter.info()
    assert not link.lost
    assert link.take_return() is None
    await link.stop()


async def test_while_nobody_drafts_features_are_handed_over_in_batches() -> None:
    verifier, drafter = toys(num_blocks=200, max_model_len=500)
    drafter.knows = never
    async with serving(verifier, drafter, replace(CONFIG, planner="algorithm1")) as actor:
        reader = Reader(actor)
        await actor.submit(request("r", max_tokens=300))
        await reader.ending("r")
        assert (await actor.snapshot()).num_gate_shut_steps > 100
        assert len(drafter.calls) < 150
        await actor.submit(request("again", max_tokens=20))
        await reader.ending("again")
        # what is held when the last request ends is handed over once there is nothing else to do
        for _ in range(500):
            if sum(features for _, _, features in drafter.calls) >= len(verifier.plans):
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("features were kept back")
        assert (await reader.ending("again")).usage.cached_tokens == 4  # type: ignore[union-attr]
        assert not drafter.faults


# -- health, statistics, curve, planner --


async def test_health_is_progress_not_liveness() -> None:
    now = 100.0
    gate = asyncio.Event()

    async def wait(_plan: Plan) -> None:
        await gate.wait()

    verifier, drafter = toys(before_verify=wait)
    config = replace(CONFIG, worker_timeout_s=60.0, stall_timeout_s=30.0)
    async with serving(verifier, drafter, config, clock=lambda: now) as actor:
        reader = Reader(actor)
        now = 1000.0
        await actor.check_health()
        await actor.submit(request("r"))
        await asyncio.sleep(0.01)
        await actor.check_health()
        now = 1031.0
        with pytest.raises(InternalFault, match="no step has completed for 31 s"):
            await actor.check_health()
        gate.set()
        await reader.ending("r")
        await actor.check_health()


async def test_health_reports_a_dead_loop() -> None:
    verifier, drafter = toys()
    async with serving(verifier, drafter) as actor:
        assert actor._task is not None
        actor._task.cancel()
        await asyncio.wait({actor._task})
        with pytest.raises(InternalFault, match="loop has ended"):
            await actor.check_health()


async def test_the_snapshot_agrees_with_what_was_streamed() -> None:
    verifier, drafter = toys(num_blocks=100)
    async with serving(verifier, drafter, clock=time.perf_counter) as actor:
        reader = Reader(actor)
        for i in range(4):
            await actor.submit(request(f"r{i}", prompt=[i, *PROMPT]))
        await reader.endings("r0", "r1", "r2", "r3")
        deltas = [d for its in reader.lists for d in its]
        stats = await actor.snapshot()
        assert stats.num_emitted_tokens == sum(len(d.token_ids) for d in deltas) == 80
        assert stats.num_verified_tokens == sum(d.num_verified for d in deltas)
        assert stats.num_rounds == sum(d.is_round for d in deltas)
        assert stats.finished == {"length": 4}
        assert stats.num_steps == len(verifier.plans)
        assert min(stats.draft_s, stats.plan_s, stats.verify_s, stats.apply_s) > 0
        assert stats.planner == "fixed:5" and stats.draft_width == 5
        assert stats.last_step_age_s >= 0


async def test_the_curve_is_measured_once_saved_and_loaded_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "curves" / "c.json"
    config = replace(CONFIG, planner="algorithm1")
    ages = []
    for from_file in (False, True):
        verifier, drafter = toys(max_model_len=2048)
        async with serving(verifier, drafter, config, curve_path=path, curve_key={"machine": "m"}) as actor:
            stats = await actor.snapshot()
            assert stats.curve_loaded and stats.curve_from_file is from_file
            assert stats.trim_off_reason == ""
            ages.append(stats.curve_age_s)
            reader = Reader(actor)
            await actor.submit(request("r"))
            await reader.ending("r")
            assert (await actor.snapshot()).predicted_s > 0
    verifier, drafter = toys(max_model_len=2048, fingerprint="other")
    async with serving(verifier, drafter, config, curve_path=path, curve_key={"machine": "m"}) as actor:
        assert not (await actor.snapshot()).curve_from_file


@pytest.mark.parametrize(
    ("who", "slower", "kept"),
    [
        ("verifier", 1.3, True),
        ("verifier", 3.0, False),
        ("verifier", 0.4, False),
        ("drafter", 1.2, True),
        ("drafter", 1.6, False),
        ("drafter", 0.6, False),
    ],
)
async def test_a_saved_curve_that_no_longer_holds_is_measured_again(
    tmp_path: Path, who: str, slower: float, kept: bool
) -> None:
    """It may have been measured while the machine was busy with something else, or by code that computed otherwise."""
    path = tmp_path / "c.json"
    verifier, drafter = toys()
    told: list[str] = []
    async with serving(verifier, drafter, CONFIG, curve_path=path, tell=told.append):
        assert told == ["measuring the cost curve"]
    changed = verifier if who == "verifier" else drafter
    usual = changed.measure

    async def measure(rows: Sequence[int], columns: Sequence[int], rows_per_request: int = 8) -> list[list[float]]:
        return [[slower * seconds for seconds in row] for row in await usual(rows, columns)]

    changed.measure = measure  # type: ignore[method-assign]
    told.clear()
    async with serving(verifier, drafter, CONFIG, curve_path=path, tell=told.append) as actor:
        assert (await actor.snapshot()).curve_from_file is kept
    assert told == ["checking the saved cost curve", *([] if kept else ["measuring the cost curve"])]
    async with serving(verifier, drafter, CONFIG, curve_path=path) as actor:
        assert (await actor.snapshot()).curve_from_file


async def test_a_machine_that_cannot_be_measured_serves_untrimmed_and_says_so() -> None:
    verifier, drafter = toys()

    async def broken(*_: object) -> list[list[float]]:
        raise RuntimeError("no clock")

    verifier.measure = broken  # type: ignore[method-assign]
    async with serving(verifier, drafter, replace(CONFIG, planner="algorithm1")) as actor:
        stats = await actor.snapshot()
        assert not stats.curve_loaded
        assert stats.trim_off_reason == "no cost curve: RuntimeError: no clock"
        reader = Reader(actor)
        await actor.submit(request("r"))
        await reader.ending("r")
        assert reader.output("r") == plain(PROMPT, greedy(max_tokens=20))


async def test_the_planner_changes_between_steps() -> None:
    verifier, drafter = toys(num_blocks=200, max_model_len=500)
    async with serving(verifier, drafter) as actor:
        reader = Reader(actor)
        await actor.set_planner("off")
        await actor.submit(request("a"))
        await reader.ending("a")
        assert (await actor.snapshot()).num_drafted_tokens == 0
        await actor.set_planner("fixed:2")
        await actor.submit(request("b"))
        await reader.ending("b")
        assert {d.num_verified for d in reader.of("b")} == {0, 2}
        with pytest.raises(SettingsError):
            await actor.set_planner("fixed:x")
        assert (await actor.snapshot()).planner == "fixed:2"


@pytest.mark.parametrize("planner", ["algorithm1", "fixed:5", "off"])
@pytest.mark.parametrize("knows", [always, never])
async def test_without_any_trouble_nothing_is_lost_or_doubled(planner: str, knows: Callable[[int, int], bool]) -> None:
    verifier = ToyVerifier(num_blocks=30, max_model_len=80)
    drafter = ToyDrafter(verifier, knows=knows)
    async with serving(verifier, drafter, replace(CONFIG, planner=planner, max_live=6, prefill_chunk=7)) as actor:
        reader = Reader(actor)
        for i in range(30):
            await actor.submit(request(f"r{i}", prompt=[i, *PROMPT], max_tokens=10 + i))
            await asyncio.sleep(0)
        await reader.endings(*(f"r{i}" for i in range(30)))
        for i in range(30):
            assert reader.output(f"r{i}") == plain([i, *PROMPT], greedy(max_tokens=10 + i))
        assert not drafter.faults
