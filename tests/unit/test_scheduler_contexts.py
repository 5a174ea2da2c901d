"""Whatever comes and goes while the gate is suspended and woken often: nobody drafts from rows that the drafter has not got, and
who has enough of them drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from scheduler import standby
from scheduler.config import SchedulerConfig
from scheduler.live import LEAST_CONTEXT, Live
from scheduler.refinement import RefinedCurve
from scheduler.wire import Draft, FinishReason, Plan, Request, SamplingParams, Speculation, Verdict
from scheduler.wishes import insists, may_draft
from tests.unit.scheduler_toys import (
    Bench,
    Committed,
    ToyDrafter,
    ToyVerifier,
    always,
    flat_curve,
    never,
    plain,
    sometimes,
)

PLANNERS = ("off", "auto", "auto", "auto", "fixed:1", "fixed:3", "threshold:0.5", "algorithm1", "algorithm1")
WISHES = ("off", "fixed:2", "auto", "threshold:0.3", "algorithm1", "")
STEMS = ((), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8) * 3, (9,) * 9, (9,) * 17)
Flight = tuple[Plan, list[Verdict], Committed | None]


@dataclass
class Storm:
    """The steps of scheduler/loop.py in one thread, in one or two cohorts, and what goes wrong between any two of them."""

    chance: random.Random
    bench: Bench
    requests: dict[str, Request] = field(default_factory=dict)
    held: list[Committed] = field(default_factory=list)
    captured: dict[str, tuple[int, int]] = field(default_factory=dict)
    flight: Flight | None = None
    lost: bool = False
    overlaps: bool = False
    cohort: int = 0
    num_suspended: int = 0

    def add(self) -> None:
        chance, name = self.chance, f"r{len(self.requests)}"
        prompt = (*chance.choice(STEMS), *(chance.randrange(2) for _ in range(chance.choice([1, 1, 2, 3, 6]))))
        params = SamplingParams(temperature=0.0, max_tokens=chance.choice([1, 3, 10, 30, 30]))
        wish = Speculation(chance.choice(WISHES), chance.choice([None, 0, 1, 3])) if chance.random() < 0.25 else None
        self.requests[name] = Request(name, prompt, params, priority=chance.choice([0, 0, 0, 50]), speculation=wish)
        self.bench.core.add(self.requests[name], self.bench.now)

    def trouble(self) -> None:
        """May happen between any two verbs."""
        if self.requests and self.chance.random() < 0.03:
            self.bench.cancel(self.chance.choice(list(self.requests)))
        if not self.lost and self.chance.random() < 0.01:
            self.drafter.forget()
            self.bench.core.drafter_lost()
            self.lost, self.held, self.captured = True, [], {}

    def changes(self) -> None:
        """Happen between steps only."""
        chance, core = self.chance, self.bench.core
        if chance.random() < 0.04:
            core.set_planner(chance.choice(PLANNERS))
        if chance.random() < 0.05:
            draft_s, token_s = chance.choice([0.0005, 0.005, 0.04]), chance.choice([1e-5, 4e-3])
            core.drafting.prices.curve = RefinedCurve(flat_curve(draft_s=draft_s, token_s=token_s, max_live=8))
        if chance.random() < 0.05:
            self.drafter.knows = chance.choice([always, never, sometimes])
        if self.lost and chance.random() < 0.3:
            self.lost = False
            core.drafter_back(self.drafter.info())

    @property
    def drafter(self) -> ToyDrafter:
        assert self.bench.drafter is not None
        return self.bench.drafter

    def draft(self, cohort: int | None) -> list[Draft]:
        core = self.bench.core
        call = core.choose_drafts(cohort)
        asked = {ask.request_id for ask in call.asks}
        vain = [live for live in core.residency.members(cohort) if self.must_draft(live)]
        assert {live.request.request_id for live in vain} <= asked
        self.num_suspended += core.drafting.suspended
        if not call.asks and len(self.held) < 5:
            return []
        features, self.held = self.held, []
        return self.drafter.propose_now(call.asks, call.width, features)

    def must_draft(self, live: Live) -> bool:
        """It has its context, and its drafts are for nobody to weigh."""
        planner, wish = self.bench.core.drafting.planner, live.request.speculation
        if self.lost or not self.bench.core.drafting.active or not live.has_context or not live.decodes:
            return False
        own = wish is not None and wish.planner
        return may_draft(live, planner, self.drafter.info()) and (
            insists(live, planner) or (not planner.adaptive and not own)
        )

    def land(self, flight: Flight) -> None:
        plan, verdicts, features = flight
        core = self.bench.core
        if self.chance.random() < 0.01:
            self.bench.verifier.die()
            self.bench.verifier.dead = False
            self.held, self.captured = [], {}
            self.bench.collect(core.verifier_lost())
            self.bench.collect(core.verifier_back(self.bench.verifier.info()))
            return
        if features is not None and not self.lost:
            self.held.append(features)
        self.trouble()
        self.bench.collect(core.apply(verdicts))
        assert core.last_step is not None
        core.record(core.last_step)
        core.check_integrity()
        for extension in plan.extensions:
            live = core.residency.live.get(extension.request_id)
            if live is None or not plan.capture or self.lost:
                self.captured.pop(extension.request_id, None)
                continue
            since, stop = self.captured.get(extension.request_id, (0, -1))
            since = since if stop == extension.start else extension.start
            self.captured[extension.request_id] = since, live.num_computed
            assert live.has_context or live.num_computed - since < LEAST_CONTEXT + self.bench.verifier.block_size

    def step(self) -> None:
        core, bench = self.bench.core, self.bench
        bench.now += 1.0
        overlapped = self.overlaps and core.overlap_pays()
        if not overlapped:
            self.land_flight()
            self.changes()
            if not core.has_work:
                self.drafter.propose_now((), 1, self.held)
                self.held = []
                return
        self.cohort = 1 - self.cohort
        cohort = self.cohort if overlapped else None
        drafts = self.draft(cohort)
        self.trouble()
        if overlapped:
            self.land_flight()
            self.changes()
        plan = core.plan(drafts, bench.now, cohort)
        core.check_integrity()
        if not plan.extensions:
            core.drop_plan()
            assert overlapped or not core.has_work, "nothing could be scheduled"
            self.overlaps = False
            return
        self.flight = (plan, *bench.verifier.verify_now(plan))
        self.trouble()
        if not overlapped:
            self.land_flight()

    def land_flight(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None:
            self.land(flight)

    def blow(self, num_steps: int) -> None:
        core = self.bench.core
        for _ in range(num_steps):
            if len(core.residency.everyone()) < 7 and self.chance.random() < 0.3:
                self.add()
            if self.chance.random() < 0.03:
                self.overlaps = not self.overlaps
            self.step()
        for _ in range(3000):
            if not core.has_work and self.flight is None:
                return
            self.step()
        raise AssertionError("it never ends")


def storm_of(seed: int) -> Storm:
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 3, 4, 8])
    least = -(-70 // block_size) + 1
    num_blocks = chance.choice([least, least + 3, 2 * least, 6 * least])
    verifier = ToyVerifier(num_blocks=num_blocks, block_size=block_size, max_model_len=80)
    drafter = ToyDrafter(
        verifier,
        knows=sometimes,
        confidence=(lambda row, k: (row >> 9) % 100 / 100) if chance.random() < 0.5 else None,
        variable_width=chance.random() < 0.7,
        max_len=chance.choice([1000, 1000, 50]),
    )
    config = SchedulerConfig(
        planner=chance.choice(PLANNERS),
        max_live=chance.choice([1, 2, 4, 6]),
        prefill_chunk=chance.choice([1, 3, 8, 64]),
        prefix_cache=chance.random() < 0.85,
    )
    return Storm(chance, Bench(config, verifier, drafter, flat_curve(max_live=8)))


def test_nobody_drafts_without_a_context_and_everyone_who_may_does_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in (("_SETTLES", 4), ("_LOOKS_AFTER", 12), ("_ASK_AGAIN", 2), ("_ASK_SUSPENDED", 4)):
        monkeypatch.setattr(standby, name, steps)
    num_suspended = 0
    for seed in range(20):
        monkeypatch.setattr("scheduler.tables.ENOUGH_CONTEXT", (4, 8, 128)[seed % 3])
        storm = storm_of(seed)
        storm.blow(120)
        num_suspended += storm.num_suspended
        bench = storm.bench
        assert not storm.drafter.faults, seed
        for name, request in storm.requests.items():
            expected, output = plain(request.prompt_ids, request.params), bench.output(name)
            cancelled = bench.ending(name).finish_reason is FinishReason.CANCELLED
            assert output == (expected[: len(output)] if cancelled else expected), (seed, name)
        stats = bench.core.stats()
        assert (stats.num_live, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        bench.core.residency.tables.cache.clear()
        assert bench.core.residency.tables.allocator.num_free == bench.verifier.num_blocks - 1
    assert num_suspended > 200
