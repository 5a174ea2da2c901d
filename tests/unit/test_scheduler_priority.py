"""Priorities, their aging, and how long one may wait for a place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import BadParams, Overloaded, revive
from scheduler.validation import check_request
from scheduler.wire import FinishReason, Request, SamplingParams
from tests.unit.scheduler_toys import VOCAB, Bench, ToyVerifier, plain

PROMPT = [3, 1, 4, 1, 5]


def bench_with(*, num_blocks: int = 200, **settings: object) -> Bench:
    """Plain decoding, one token a step, one step a second."""
    return Bench(SchedulerConfig(planner="off", **settings), ToyVerifier(num_blocks=num_blocks))  # type: ignore[arg-type]


def admission_order(bench: Bench) -> list[str]:
    """Runs to the end; the requests in the order of their first tokens."""
    bench.run()
    return list(bench.deltas)


def test_a_higher_priority_is_admitted_first_and_equals_in_the_order_they_came() -> None:
    bench = bench_with(max_live=1)
    bench.add("running", PROMPT, max_tokens=3)
    bench.step()
    for name, priority in [("a", 0), ("b", 2), ("c", 0), ("d", 2), ("e", -1), ("f", 5)]:
        bench.add(name, PROMPT, priority=priority, max_tokens=2)
    assert admission_order(bench) == ["running", "f", "b", "d", "a", "c", "e"]


@pytest.mark.parametrize(("waited", "first"), [(29, "new"), (31, "old")])
def test_waiting_for_the_aging_time_is_worth_one_level(waited: int, first: str) -> None:
    bench = bench_with(max_live=1, priority_aging_s=30.0)
    bench.add("running", PROMPT, max_tokens=60)
    bench.step()
    bench.add("old", PROMPT, max_tokens=2)
    for _ in range(waited):
        bench.step()
    bench.add("new", PROMPT, priority=1, max_tokens=2)
    assert admission_order(bench)[1] == first


def test_a_low_priority_is_served_in_the_end_however_many_higher_ones_keep_coming() -> None:
    bench = bench_with(max_live=1, priority_aging_s=10.0)
    bench.add("running", PROMPT, max_tokens=2)
    bench.add("low", PROMPT, priority=-3, max_tokens=2)
    for number in itertools.count():
        bench.add(f"high{number}", PROMPT, priority=3, max_tokens=2)
        bench.step()
        bench.step()
        if "low" in bench.deltas:
            break
        assert bench.now < 100
    assert bench.now > 50


def test_without_aging_time_priorities_are_ignored() -> None:
    bench = bench_with(max_live=1, priority_aging_s=0.0)
    for name, priority in [("a", 0), ("b", 9), ("c", -9)]:
        bench.add(name, PROMPT, priority=priority, max_tokens=2)
    assert admission_order(bench) == ["a", "b", "c"]


def test_when_blocks_run_out_the_lowest_priority_goes_first_and_among_equals_the_youngest() -> None:
    bench = bench_with(num_blocks=21, prefix_cache=False)
    prompts = {name: [i, *PROMPT] for i, name in enumerate("abcd")}
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 1)]:
        bench.add(name, prompts[name], priority=priority, max_tokens=40)
    lost: list[str] = []
    while bench.core.has_work:
        had = set(bench.core.residency.live)
        bench.step()
        ended = {name for name, deltas in bench.deltas.items() if deltas[-1].finish_reason}
        lost += sorted(had - set(bench.core.residency.live) - ended)
    assert list(dict.fromkeys(lost))[:3] == ["c", "a", "d"] and "b" not in lost
    for name, prompt in prompts.items():
        assert bench.output(name) == plain(prompt, SamplingParams(temperature=0.0, max_tokens=40))


def test_mixed_priorities_in_a_tiny_pool_all_end_with_their_own_text() -> None:
    rng = np.random.default_rng(5)
    bench = bench_with(num_blocks=17, max_live=5, prefill_chunk=7, priority_aging_s=3.0)
    for i in range(30):
        bench.add(f"r{i}", [i, *PROMPT], priority=int(rng.integers(-2, 3)), max_tokens=int(rng.integers(1, 30)))
        bench.step()
    bench.run()
    assert bench.core.stats().num_preemptions > 0
    assert all(bench.ending(f"r{i}").finish_reason is FinishReason.LENGTH for i in range(30))
    assert all(
        bench.output(f"r{i}") == plain([i, *PROMPT], SamplingParams(max_tokens=len(bench.output(f"r{i}"))))
        for i in range(30)
    )


def test_the_queue_position_counts_those_who_are_served_before() -> None:
    bench = bench_with(max_live=1)
    bench.add("running", PROMPT, max_tokens=3)
    bench.step()
    bench.add("a", PROMPT, max_tokens=2)
    bench.add("b", PROMPT, priority=1, max_tokens=2)
    position = bench.core.queue_position
    assert [position(name) for name in ("running", "b", "a", "nobody")] == [0, 1, 2, None]
    bench.cancel("b")
    assert [position(name) for name in ("a", "b")] == [1, None]


def test_who_waits_longer_than_the_limit_is_refused_as_overloaded_and_nobody_else() -> None:
    bench = bench_with(max_live=1, max_wait_s=5.0)
    bench.add("running", PROMPT, max_tokens=8)
    bench.step()
    bench.add("first", PROMPT, max_tokens=2)
    bench.add("second", PROMPT, priority=1, max_tokens=2)
    for _ in range(4):
        bench.step()
    bench.add("late", PROMPT, max_tokens=2)
    bench.run()
    refused = bench.ending("first")
    assert refused.finish_reason is FinishReason.ERROR and refused.error is not None
    assert isinstance(revive(*refused.error), Overloaded)
    assert "waited 5 s for a place, with 0 before it; the limit is 5 s" in refused.error[1]
    assert bench.ending("second").finish_reason is FinishReason.ERROR
    assert bench.ending("running").finish_reason is FinishReason.LENGTH
    assert bench.ending("late").finish_reason is FinishReason.LENGTH


def test_a_preempted_request_is_not_refused_however_long_it_waits_for_its_place_again() -> None:
    bench = bench_with(num_blocks=12, max_wait_s=4.0, prefix_cache=False)
    bench.add("a", PROMPT, max_tokens=35)
    bench.add("b", [*PROMPT, 9], max_tokens=35)
    bench.run()
    assert bench.core.stats().num_preemptions > 0
    assert all(bench.ending(name).finish_reason is FinishReason.LENGTH for name in "ab")


@pytest.mark.parametrize("priority", [-101, 101, 10**400])
def test_a_priority_out_of_range_is_refused_by_name(priority: int) -> None:
    with pytest.raises(BadParams, match="priority must be from -100 to 100") as refusal:
        check_request(Request("r", (1,), priority=priority), VOCAB)
    assert refusal.value.param == "priority"
