"""Benchmark arithmetic: percentiles, ratios of sums, speedups of rounds run side by side, fair order, prompt files."""

from __future__ import annotations

import asyncio
import json

import pytest

from scheduler.errors import SettingsError
from scheduler.wire import Delta
from services.bench.load import Load, run_arms
from services.bench.prompts import BUILT_IN, load_prompts
from services.bench.report import Arm, percentile, report, speedup
from services.generate import Tally


def tally(num_tokens: int, rounds: int, first_s: float = 0.1, last_s: float = 1.1, verified: int = 0) -> Tally:
    return Tally(
        first_token_s=first_s,
        last_token_s=last_s,
        num_tokens=num_tokens,
        num_rounds=rounds,
        num_round_tokens=num_tokens - 1,
        num_verified=verified,
    )


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (99, 4.0), (100, 4.0), (25, 1.0), (26, 2.0)])
def test_percentiles_are_values_that_were_measured(percent, value):
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value
    assert percentile([], percent) == 0.0


def test_time_per_token_divides_by_tokens_not_by_chunks():
    arm = Arm.of_run("code", 1, "off", [tally(11, 5), tally(1, 0)], seconds=2.0)
    assert arm.per_token_s == [pytest.approx(0.1)] and arm.tokens_per_s == [6.0]


def test_lengths_are_ratios_of_sums_not_means_of_ratios():
    runs = [
        Arm.of_run("code", 1, "p", [tally(11, 10, verified=70)], 1.0),
        Arm.of_run("code", 1, "p", [tally(3, 1)], 1.0),
    ]
    merged = Arm.merged(runs)
    assert merged.accept_length == 12 / 11 and merged.budget == 70 / 11
    assert merged.tokens_per_s == [11.0, 3.0]
    assert Arm.of_run("code", 1, "p", [tally(1, 0)], 1.0).accept_length == 1.0


def test_speedup_pairs_the_rounds_that_ran_side_by_side():
    slow = Arm.merged([Arm.of_run("c", 1, "off", [tally(10, 9)], s) for s in (1.0, 10.0, 2.0)])
    fast = Arm.merged([Arm.of_run("c", 1, "x", [tally(10, 9)], s / 2) for s in (1.0, 10.0, 2.0)])
    assert speedup(fast, slow) == 2.0
    rows = report([slow, fast], ("off", "x"))
    assert [row["speedup"] for row in rows] == [1.0, 2.0] and json.dumps(rows)


def test_a_tally_counts_rounds_and_leaves_the_prefill_out():
    counted = Tally()
    counted.add(Delta("r", (1,)))
    counted.add(Delta("r", (2, 3, 4), is_round=True, num_drafted=7, num_verified=5, num_accepted=2))
    counted.add(Delta("r", (), finish_reason=None))
    assert (counted.num_tokens, counted.num_rounds, counted.num_round_tokens) == (4, 1, 3)
    assert (counted.num_drafted, counted.num_verified, counted.num_accepted) == (7, 5, 2)


async def test_arms_get_the_same_prompts_in_the_same_order_and_take_turns_at_going_first():
    log: list[tuple[str, str]] = []
    live = most = 0
    planner = ""

    async def set_planner(name: str) -> None:
        nonlocal planner
        planner = name

    async def ask(prompt: str) -> Tally:
        nonlocal live, most
        log.append((planner, prompt))
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.001)
        live -= 1
        return tally(10, 9)

    load = Load(planners=("a", "b"), concurrency=(3,), rounds=2)
    arms = await run_arms(load, load.planners, {"kind": ["p", "q"]}, ask, set_planner)
    warm, measured = log[:4], log[4:]
    assert [name for name, _ in warm] == ["a", "a", "b", "b"]
    asked = ["p", "q"] * 3
    assert [prompt for _, prompt in measured] == asked * 4
    assert [name for name, _ in measured] == ["a"] * 6 + ["b"] * 6 + ["b"] * 6 + ["a"] * 6
    assert most == 3 and [(arm.planner, len(arm.tokens_per_s)) for arm in arms] == [("a", 2), ("b", 2)]


def test_prompts_of_our_own_have_three_kinds_and_none_twice():
    assert set(BUILT_IN) == {"code", "math", "chat"}
    everything = [prompt for prompts in BUILT_IN.values() for prompt in prompts]
    assert len(set(everything)) == len(everything)
    assert {kind: len(prompts) for kind, prompts in load_prompts((), 2).items()} == {"code": 2, "math": 2, "chat": 2}


def test_a_prompt_file_is_a_kind_of_its_own_and_its_first_turn_is_asked(tmp_path):
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"id": "1", "turns": ["first", "second"]}\n\n{"turns": ["third"]}\n')
    assert load_prompts((str(file),), 0) == {"gsm8k": ["first", "third"]}


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [1]}', '{"prompt": "x"}', "[]"])
def test_a_bad_prompt_line_is_named(tmp_path, line):
    file = tmp_path / "x.jsonl"
    file.write_text('{"turns": ["good"]}\n' + line + "\n")
    with pytest.raises(SettingsError, match="line 2"):
        load_prompts((str(file),), 0)


def test_an_empty_prompt_file_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(SettingsError, match="holds no prompts"):
        load_prompts((str(tmp_path / "x.jsonl"),), 0)
