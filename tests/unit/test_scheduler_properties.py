"""Whatever arrives, is cancelled, preempted or lost, in whatever order: every request gets one ending and the plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig
from scheduler.wire import FinishReason, SamplingParams
from tests.unit.scheduler_toys import (
    Bench,
    ToyDrafter,
    ToyVerifier,
    always,
    flat_curve,
    never,
    plain,
    sometimes,
)

PLANNERS = ("algorithm1", "fixed:1", "fixed:2", "fixed:5", "threshold:0.5", "off")
KINDS: dict[str, Callable[[int, int], bool] | None] = {
    "oracle": always,
    "adversary": never,
    "partial": sometimes,
    "none": None,
}


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class World:
    planner: str
    kind: str
    confident: bool
    variable_width: bool
    block_size: int
    num_blocks: int
    max_live: int
    prefill_chunk: int
    prefix_cache: bool
    curve: bool
    max_draft_len: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    # Few different beginnings, so that prompts share prefixes.
    stem = draw(st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4), (9,) * 9]))
    tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    max_tokens = draw(st.integers(1, 16))
    return Arrival(
        prompt=(*stem, *tail),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_ids=tuple(draw(st.lists(st.integers(0, 49), max_size=4, unique=True))),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([1, 3, 4]))
    # The longest request has 17 prompt tokens and 16 more: 32 rows.
    least = -(-33 // block_size) + 1
    return World(
        planner=draw(st.sampled_from(PLANNERS)),
        kind=draw(st.sampled_from(sorted(KINDS))),
        confident=draw(st.booleans()),
        variable_width=draw(st.booleans()),
        block_size=block_size,
        num_blocks=draw(st.integers(least, 3 * least)),
        max_live=draw(st.integers(1, 5)),
        prefill_chunk=draw(st.sampled_from([1, 3, 8, 64])),
        prefix_cache=draw(st.booleans()),
        curve=draw(st.booleans()),
        max_draft_len=draw(st.sampled_from([12, 1000])),
    )


def bench_of(world: World) -> Bench:
    verifier = ToyVerifier(num_blocks=world.num_blocks, block_size=world.block_size, max_model_len=40)
    knows = KINDS[world.kind]
    drafter = None
    if knows is not None:
        drafter = ToyDrafter(
            verifier,
            knows=knows,
            confidence=(lambda row, k: (row >> 9) % 100 / 100) if world.confident else None,
            variable_width=world.variable_width,
            max_len=world.max_draft_len,
        )
    config = SchedulerConfig(
        planner=world.planner,
        max_live=world.max_live,
        prefill_chunk=world.prefill_chunk,
        prefix_cache=world.prefix_cache,
    )
    return Bench(config, verifier, drafter, flat_curve() if world.curve else None)


def check_output(bench: Bench, name: str, arrival: Arrival) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=arrival.max_tokens, min_tokens=arrival.min_tokens, stop_ids=arrival.stop_ids
    )
    expected = plain(arrival.prompt, params)
    output, ending = bench.output(name), bench.ending(name)
    if ending.finish_reason is FinishReason.CANCELLED:
        assert output == expected[: len(output)]
    else:
        assert output == expected
        stopped = expected[-1] in arrival.stop_ids and len(expected) > arrival.min_tokens
        assert ending.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert ending.usage is not None
    assert ending.usage.completion_tokens == len(output)
    assert ending.usage.prompt_tokens == len(arrival.prompt)


def check_everything_given_back(bench: Bench) -> None:
    bench.core.check_integrity()
    stats = bench.core.stats()
    assert (stats.num_live, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    bench.core.residency.tables.cache.clear()
    assert bench.core.residency.tables.allocator.num_free == bench.verifier.num_blocks - 1


@settings(max_examples=250, deadline=None)
@given(world=worlds(), requests=st.lists(arrivals(), min_size=1, max_size=9), data=st.data())
def test_every_request_gets_the_plain_text_and_one_ending(
    world: World, requests: Sequence[Arrival], data: st.DataObject
) -> None:
    bench = bench_of(world)
    left = {f"r{i}": arrival for i, arrival in enumerate(requests)}
    seen: dict[str, Arrival] = {}

    def cancel_someone() -> None:
        if seen and data.draw(st.integers(0, 5), label="cancel?") == 0:
            bench.cancel(data.draw(st.sampled_from(sorted(seen)), label="whom"))

    while left or bench.core.has_work:
        if left and (not bench.core.has_work or data.draw(st.booleans(), label="arrive?")):
            name, arrival = left.popitem()
            seen[name] = arrival
            bench.add(
                name,
                arrival.prompt,
                max_tokens=arrival.max_tokens,
                min_tokens=arrival.min_tokens,
                stop_ids=arrival.stop_ids,
            )
        cancel_someone()
        if bench.core.has_work:
            bench.step(during_draft=cancel_someone, during_verify=cancel_someone)
    for name, arrival in seen.items():
        check_output(bench, name, arrival)
    check_everything_given_back(bench)


@settings(max_examples=120, deadline=None)
@given(world=worlds(), requests=st.lists(arrivals(), min_size=1, max_size=6), data=st.data())
def test_lost_workers_cost_time_but_no_token(world: World, requests: Sequence[Arrival], data: st.DataObject) -> None:
    bench = bench_of(world)
    core, drafter = bench.core, bench.drafter
    for i, arrival in enumerate(requests):
        bench.add(
            f"r{i}",
            arrival.prompt,
            max_tokens=arrival.max_tokens,
            min_tokens=arrival.min_tokens,
            stop_ids=arrival.stop_ids,
        )
    for _ in range(200):
        if not core.has_work:
            break
        event = data.draw(st.sampled_from(["none", "none", "verifier", "drafter", "planner"]), label="event")
        if event == "verifier":
            bench.verifier.die()
            bench.verifier.dead = False
            bench.features.clear()
            bench.collect(core.verifier_lost())
            core.check_integrity()
            bench.collect(core.verifier_back(bench.verifier.info()))
        elif event == "drafter" and drafter is not None:
            if core.drafting.alive:
                drafter.forget()
                bench.features.clear()
                core.drafter_lost()
            else:
                core.drafter_back(drafter.info())
        elif event == "planner":
            core.set_planner(data.draw(st.sampled_from(PLANNERS), label="planner"))
        bench.step()
    bench.run()
    for i, arrival in enumerate(requests):
        check_output(bench, f"r{i}", arrival)
    check_everything_given_back(bench)
    if drafter is not None:
        assert not drafter.faults


@settings(max_examples=60, deadline=None)
@given(world=worlds(), requests=st.lists(arrivals(), min_size=2, max_size=6))
def test_the_counters_add_up_to_the_tokens_delivered(world: World, requests: Sequence[Arrival]) -> None:
    """Accept length must not count tokens behind a stop, nor drafts that were trimmed or dropped."""
    bench = bench_of(world)
    for i, arrival in enumerate(requests):
        bench.add(f"r{i}", arrival.prompt, max_tokens=arrival.max_tokens, stop_ids=arrival.stop_ids)
    bench.run()
    deltas = [delta for its_deltas in bench.deltas.values() for delta in its_deltas]
    rounds = [delta for delta in deltas if delta.is_round]
    stats = bench.core.stats()
    assert stats.num_emitted_tokens == sum(len(d.token_ids) for d in deltas)
    assert stats.num_rounds == len(rounds)
    assert stats.num_round_tokens == sum(len(d.token_ids) for d in rounds)
    assert stats.num_drafted_tokens == sum(d.num_drafted for d in rounds)
    assert stats.num_verified_tokens == sum(d.num_verified for d in rounds) == sum(stats.verified_at)
    assert stats.num_accepted_tokens == sum(d.num_accepted for d in rounds) == sum(stats.accepted_at)
    for delta in rounds:
        # The target's own token comes last, unless the answer ended inside the accepted drafts.
        assert delta.num_accepted <= len(delta.token_ids) <= delta.num_accepted + 1
        assert len(delta.token_ids) == delta.num_accepted + 1 or delta.finish_reason is not None
        assert delta.num_accepted <= delta.num_verified <= delta.num_drafted
    for i, arrival in enumerate(requests):
        left = arrival.max_tokens
        for delta in bench.deltas[f"r{i}"]:
            assert delta.num_verified < left, "the last token a request may get is the target's own"
            left -= len(delta.token_ids)


@pytest.mark.parametrize("planner", ["fixed:5", "algorithm1"])
def test_a_pool_for_one_request_serves_many(planner: str) -> None:
    verifier = ToyVerifier(num_blocks=9, block_size=4, max_model_len=64)
    bench = Bench(
        SchedulerConfig(planner=planner, prefill_chunk=4, max_live=8), verifier, ToyDrafter(verifier), flat_curve()
    )
    for i in range(12):
        bench.add(f"r{i}", [i, 1, 2, 3, 4], max_tokens=27)
    bench.run()
    for i in range(12):
        assert bench.output(f"r{i}") == plain([i, 1, 2, 3, 4], SamplingParams(max_tokens=27))
    assert bench.core.stats().num_preemptions > 0
