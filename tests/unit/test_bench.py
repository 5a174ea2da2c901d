"""Benchmark arithmetic: windows, percentiles, ratios of rounds run side by side, goodput; fair order; prompt files; flags."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from scheduler.errors import Failed, Overloaded, SettingsError
from scheduler.wire import Delta, Verdict
from services.bench.arms import ServerSubject
from services.bench.load import Answers, closed_loop, open_loop, tokens_between
from services.bench.pictures import Ramp, draw
from services.bench.prompts import BUILT_IN, load_prompts
from services.bench.ramp import course, ramp_load
from services.bench.report import (
    Arm,
    Limits,
    Place,
    Ratio,
    best_fixed,
    percentile,
    points,
    rows,
    steady_over_best_fixed,
    sustained,
    table,
)
from services.bench.server import count_chunk
from services.bench.steps import Step, StepClock, steady_speed
from services.bench.sweep import Runner, Sweep, rotated
from services.cli import main
from services.generate import Tally

HERE = Place("code", 0.0, concurrency=1)


def tally(
    num_tokens: int, rounds: int, *, began=0.0, first_s: float = 0.1, last_s: float = 1.1, verified: int = 0
) -> Tally:
    return Tally(
        began=began,
        first_token_s=first_s,
        last_token_s=last_s,
        num_tokens=num_tokens,
        num_rounds=rounds,
        num_round_tokens=num_tokens - 1,
        num_verified=verified,
    )


def arm(planner: str, *seconds: float, place: Place = HERE) -> Arm:
    """Ten tokens a round, in so many seconds."""
    made = Arm(place, planner)
    for s in seconds:
        made.add(Answers(0.0, s, [tally(10, 9, last_s=s)]), Limits())
    return made


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (99, 4.0), (100, 4.0), (25, 1.0), (26, 2.0)])
def test_percentiles_are_values_that_were_measured(percent, value):
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value
    assert percentile([], percent) == 0.0


def test_time_per_token_divides_by_tokens_not_by_chunks():
    made = Arm(HERE, "off")
    made.add(Answers(0.0, 2.0, [tally(11, 5), tally(1, 0, last_s=0.1)]), Limits())
    assert made.per_token_s == [pytest.approx(0.1)] and made.tokens_per_s == [6.0]


def test_only_tokens_inside_the_window_count():
    answer = tally(11, 10, began=5.0, first_s=1.0, last_s=3.0)
    assert tokens_between(answer, 0.0, 100.0) == 11
    assert tokens_between(answer, 0.0, 7.0) == 1 + 5
    assert tokens_between(answer, 7.0, 100.0) == 5
    assert tokens_between(answer, 6.5, 7.5) == pytest.approx(5.0)
    assert tokens_between(answer, 9.0, 100.0) == tokens_between(tally(0, 0), 0.0, 9.0) == 0
    assert tokens_between(tally(3, 1, first_s=0.5, last_s=0.5), 0.0, 1.0) == 3, "all in one chunk"


def test_lengths_are_ratios_of_sums_not_means_of_ratios():
    made = Arm(HERE, "p")
    made.add(Answers(0.0, 2.0, [tally(11, 10, verified=70)]), Limits())
    made.add(Answers(0.0, 2.0, [tally(3, 1)]), Limits())
    assert made.accept_length == 12 / 11 and made.budget == 1 + 70 / 11
    assert made.tokens_per_s == [5.5, 1.5]
    assert Arm(HERE, "p").accept_length == 1.0


def test_ratios_pair_the_rounds_that_ran_side_by_side():
    slow, fast = arm("off", 1.0, 10.0, 2.0), arm("x", 0.5, 5.0, 0.8)
    assert Ratio.of(fast, slow) == Ratio(2.0, 2.0, pytest.approx(2.5))
    listed = rows({HERE: {"off": slow, "x": fast}})
    assert [row["over_off"] for row in listed] == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.5]] and json.dumps(listed)


def test_regret_is_against_the_best_of_the_fixed_arms():
    arms = {
        name: arm(name, s) for name, s in (("off", 2.0), ("fixed:3", 1.0), ("threshold:0.5", 0.1), ("algorithm1", 1.25))
    }
    assert best_fixed(arms).planner == "fixed:3"
    assert {row["planner"]: row["over_best_fixed"][0] for row in rows({HERE: arms})}["algorithm1"] == 0.8
    assert [point.ratio for point in points({HERE: arms})][:2] == [0.5, 1.0]
    assert len(table({HERE: arms})) == 5


def test_equal_arms_whose_speeds_are_luck_are_equal_to_their_best():
    """Against the greatest of six medians of five rounds they were six percent behind."""
    random = np.random.default_rng(5)
    medians = []
    for _ in range(200):
        speeds = random.lognormal(0.0, 0.15, (6, 5))
        names = ("off", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "auto")
        arms = {name: arm(name, *(10 / speed for speed in own)) for name, own in zip(names, speeds, strict=True)}
        medians.append(Ratio.over_best_fixed(arms["auto"], arms).median)
    assert np.mean(medians) == pytest.approx(1.0, abs=0.02)


def test_a_fixed_arm_that_is_always_better_is_what_others_are_held_against():
    arms = {"off": arm("off", 2.0, 2.2), "fixed:3": arm("fixed:3", 1.0, 1.1), "auto": arm("auto", 1.25, 1.1)}
    assert Ratio.over_best_fixed(arms["auto"], arms) == Ratio(0.9, 0.8, 1.0)
    assert Ratio.over_best_fixed(arms["fixed:3"], arms) == Ratio(1.0, 1.0, 1.0)
    assert Ratio.over_best_fixed(arms["auto"], {"auto": arms["auto"]}) is None


def test_a_disturbed_step_does_not_count_in_the_steady_speed():
    quiet = [Step(1.0, 0.010, 4, True, 8)] * 20 + [Step(1.0, 0.008, 4, False, 4)] * 20
    stalled = [*quiet, *[Step(1.0, 3.0, 4, True, 8)] * 5]
    assert steady_speed(quiet) == pytest.approx(240 / 0.36)
    assert steady_speed(stalled) == pytest.approx(280 / 0.41), "a step of 10 ms, like its kind"
    assert steady_speed([]) == 0.0
    assert [Step(1.0, 0.1, n, True, 1).kind[1] for n in (1, 7, 8, 15, 16, 70)] == [1, 7, 8, 8, 16, 64]
    arms = {"off": arm("off", 1.0), "fixed:3": arm("fixed:3", 1.0), "auto": arm("auto", 1.0)}
    for made, emitted in zip(arms.values(), (4, 8, 6), strict=True):
        made.add(Answers(0.0, 1.0, [tally(10, 9)]), Limits(), [Step(1.0, 0.01, 4, True, emitted)])
    assert steady_over_best_fixed(arms) == pytest.approx({"off": 0.5, "fixed:3": 1.0, "auto": 0.75})
    assert [row["steady_over_best_fixed"] for row in rows({HERE: arms})] == [0.5, 1.0, 0.75]
    assert steady_over_best_fixed({"auto": arms["auto"]}) == {} == steady_over_best_fixed({"off": arm("off", 1.0)})


def test_the_step_clock_takes_steps_that_lie_within_a_window_whole(monkeypatch):
    now = 100.0
    monkeypatch.setattr("services.bench.steps.time.monotonic", lambda: now)
    clock = StepClock()
    extensions = tuple(SimpleNamespace(samples=samples) for samples in (True, True, False))
    plan = SimpleNamespace(extensions=extensions, num_tokens=9)
    verdicts = [Verdict("a", 2, (1, 2, 3)), Verdict("b", 0, (), error=("InternalFault", "x")), Verdict("c", 0, ())]
    for at in (100.2, 100.4, 100.5):
        clock.drafted([object()] if at != 100.5 else [])
        now = at
        clock.verified(plan, verdicts)
    taken = clock.take(100.1, 100.5)
    assert [(step.num_emitted, step.num_tokens, step.drafted) for step in taken] == [(3, 9, True), (3, 9, False)]
    assert [round(step.seconds, 3) for step in taken] == [0.2, 0.1] and clock.take(0.0, 1e9) == []


def test_one_arm_alone_has_no_ratios():
    (row,) = rows({HERE: {"server": arm("server", 1.0)}})
    assert row["over_off"] is row["over_best_fixed"] is row["best_fixed"] is None


def test_a_good_answer_begins_in_time_and_keeps_its_pace_and_a_refused_one_is_not_good():
    place, made = Place("chat", 0.0, rate=2.0), Arm(Place("chat", 0.0, rate=2.0), "off")
    answers = [tally(11, 5), tally(11, 5, first_s=3.0, last_s=4.0), tally(2, 1, last_s=9.0), tally(1, 0, last_s=0.1)]
    made.add(Answers(0.0, 10.0, answers, num_refused=1), Limits(ttft_s=1.0, tpot_s=0.2))
    assert (made.num_good, made.num_asked, made.good_share) == (2, 5, 0.4)
    assert made.good_per_s == [0.2]
    assert sustained({place: {"off": made}}, share=0.4) == [
        {"kind": "chat", "temperature": 0.0, "planner": "off", "rate": 2.0}
    ]
    assert sustained({place: {"off": made}})[0]["rate"] == 0.0


def test_a_tally_counts_rounds_and_leaves_the_prefill_out():
    counted = Tally()
    counted.add(Delta("r", (1,)))
    counted.add(Delta("r", (2, 3, 4), is_round=True, num_drafted=7, num_verified=5, num_accepted=2))
    counted.add(Delta("r", (), finish_reason=None))
    assert (counted.num_tokens, counted.num_rounds, counted.num_round_tokens) == (4, 1, 3)
    assert (counted.num_drafted, counted.num_verified, counted.num_accepted) == (7, 5, 2)


class Clockwork:
    """A subject whose answers take 10 ms; writes down who asked what under which planner."""

    model = "clockwork"

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.planner = ""
        self.live = self.most = 0
        self.capacity = 100

    async def use(self, planner: str) -> None:
        assert self.live == 0, "the arm before is still running"
        self.planner = planner

    async def ask(self, body) -> Tally:
        if self.live >= self.capacity:
            raise Overloaded("full")
        self.log.append((self.planner, body["messages"][0]["content"], body["max_tokens"]))
        self.live += 1
        self.most = max(self.most, self.live)
        answer = Tally(began=time.monotonic())
        await asyncio.sleep(0.01)
        self.live -= 1
        answer.num_tokens, answer.first_token_s, answer.last_token_s = 10, 0.001, time.monotonic() - answer.began
        return answer


async def test_arms_get_the_same_prompts_in_the_same_order_and_take_turns_at_going_first(capsys, in_virtual_time):
    subject = Clockwork()
    sweep = Sweep(planners=("a", "b"), concurrency=(3,), rounds=2)
    runner = Runner(sweep, subject, {"kind": ["p", "q"]})
    await runner.run()
    warm = [(planner, prompt) for planner, prompt, tokens in subject.log if tokens == 2]
    measured = [(planner, prompt) for planner, prompt, tokens in subject.log if tokens == 96]
    assert warm == [(planner, prompt) for planner in "abba" for prompt in "pq"], (
        "each arm is warmed up, outside the window"
    )
    assert [prompt for _, prompt in measured] == list(itertools.islice(itertools.cycle("pq"), 9)) * 4
    assert [planner for planner, _ in measured] == ["a"] * 9 + ["b"] * 18 + ["a"] * 9
    assert subject.most == 3
    (arms,) = runner.results.values()
    assert [(name, len(each.tokens_per_s)) for name, each in arms.items()] == [("a", 2), ("b", 2)]
    progress = capsys.readouterr().err.splitlines()
    assert len(progress) == 4 and progress[0].startswith("[1/4] kind T=0 load 3 round 1 a: ")


async def test_the_window_of_a_closed_loop_ends_when_the_first_client_has_nothing_left(in_virtual_time):
    subject = Clockwork()

    async def ask(prompt: str) -> Tally:
        if prompt == "long":
            await asyncio.sleep(0.2)
        return await subject.ask({"messages": [{"content": prompt}], "max_tokens": 1})

    answers = await closed_loop(["x", "x", "long", "x"], 2, ask)
    assert len(answers.tallies) == 4 and answers.seconds < 0.15


async def test_arrivals_are_the_same_for_every_arm_and_a_refusal_is_counted_not_raised(in_virtual_time):
    subject = Clockwork()
    subject.capacity = 1

    async def ask(prompt: str) -> Tally:
        return await subject.ask({"messages": [{"content": prompt}], "max_tokens": 1})

    runs = [await open_loop(["x"] * 40, 400.0, ask, seed=3) for _ in range(2)]
    assert runs[0].seconds == pytest.approx(runs[1].seconds)
    assert all(run.num_refused > 0 and len(run.tallies) > 0 for run in runs)
    assert 0 < len(runs[0].counted) < len(runs[0].tallies), "the first fifth only warms up"


async def test_the_first_failure_ends_the_run_and_is_the_one_raised():
    async def ask(prompt: str) -> Tally:
        await asyncio.sleep(0 if prompt == "bad" else 60)
        raise Failed("broken")

    with pytest.raises(Failed, match="broken"):
        await asyncio.wait_for(closed_loop(["good", "bad"], 2, ask), 30)


async def test_a_server_s_requests_name_their_planner_and_must_be_told_that_it_held():
    bodies = []

    class Remote:
        async def ask(self, body):
            bodies.append(body)
            return tally(3, 1)

    subject = ServerSubject(Remote(), "m")
    await subject.ask({"x": 1})
    await subject.use("fixed:3")
    await subject.ask({"x": 1})
    await subject.use("server")
    await subject.ask({"x": 1})
    assert bodies == [{"x": 1}, {"x": 1, "speculation": {"mode": "fixed:3"}}, {"x": 1}]
    usage = {
        "choices": [],
        "usage": {"completion_tokens": 9},
        "metrics": {"speculative_decoding": {"num_spec_steps": 4}},
    }
    count_chunk(counted := Tally(), usage)
    assert (counted.num_tokens, counted.num_rounds) == (9, 4)
    with pytest.raises(Failed, match=r"does not report speculation\.mode 'fixed:3'"):
        count_chunk(Tally(), usage, {"mode": "fixed:3"})
    usage["metrics"]["speculative_decoding"]["mode"] = "fixed:3"
    count_chunk(Tally(), usage, {"mode": "fixed:3"})


def test_every_arm_is_once_first():
    assert [list(rotated("abc", by)) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_mixed_text_takes_the_kinds_in_turn_and_unknown_kinds_are_named():
    prompts = Sweep(kinds=("mixed", "code"), num_prompts=2).prompts()
    assert list(prompts) == ["mixed", "code"]
    assert prompts["mixed"][:3] == [BUILT_IN[kind][0] for kind in BUILT_IN] and len(prompts["mixed"]) == 6
    with pytest.raises(SettingsError, match=r"--kinds poems: there are code, math, chat, mixed"):
        Sweep(kinds=("poems",)).prompts()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "--concurrency '0': write different numbers"),
        (["--concurrency", "4,4"], "--concurrency '4,4'"),
        (["--poisson", "x"], "--poisson 'x'"),
        (["--temperature", "-1"], "--temperature '-1'"),
        (["--planners", "best"], "'best' is not a planner"),
        (["--planners", "off,off"], "--planners off,off: each arm once"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--arrivals", "2"], "--arrivals 2: must be at least 5"),
        (["--concurrency", "none"], "nothing to run"),
        (["--ramp", "16"], "--ramp '16': write clients by stages, for example 1-16-1"),
        (["--ramp", "1-0-1"], "--ramp '1-0-1'"),
        (["--ramp", "1-2", "--stage-seconds", "nan"], "--stage-seconds nan: must be from 0.1"),
        (["--tpot-ms", "0"], "--tpot-ms 0.0: must be above 0"),
        (["--kinds", "poems"], "--kinds poems: there are"),
        (["--url", "http://127.0.0.1:9/v1", "--record", "x.jsonl"], "--record needs the engine in this process"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(flags, message, capsys):
    for command in (["bench"], ["bench", "sweep"]):
        assert main([*command, *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


async def test_a_ramp_has_as_many_clients_as_its_stages_say(in_virtual_time):
    subject, asked = Clockwork(), []

    async def ask(prompt: str) -> Tally:
        asked.append((time.monotonic(), subject.live + 1))
        return await subject.ask({"messages": [{"content": prompt}], "max_tokens": 1})

    began, tallies = await ramp_load(["p", "q"], (1, 5, 2), 0.303, ask)
    assert len(tallies) == len(asked) and subject.most == 5
    by_stage = [[live for at, live in asked if int((at - began + 1e-6) / 0.303) == stage] for stage in range(3)]
    assert max(by_stage[0]) == 1 and max(by_stage[2][10:]) == 2, "what the stage before began is answered first"
    assert [stage[-1] for stage in by_stage] == [1, 5, 2]


def test_the_course_of_a_ramp_spreads_each_answer_over_its_time():
    def answer(at: float, tokens: int, rounds: int, verified: int) -> Tally:
        return Tally(
            first_token_s=1.0, last_token_s=5.0, num_tokens=tokens, num_rounds=rounds, num_verified=verified, began=at
        )

    ramp = course(100.0, [answer(99.0, 80, 40, 120), answer(103.0, 80, 80, 0)], (1, 2), 8.0)
    assert ramp.seconds == [float(second) for second in range(1, 9)]
    assert ramp.live == pytest.approx([1.0] * 8)
    assert ramp.tokens_per_s == pytest.approx([20.0] * 8)
    assert ramp.budget == pytest.approx([4.0] * 4 + [1.0] * 4)
    assert ramp.by_stage(4.0, 3) == [(20.0, 4.0), (20.0, 1.0), (0.0, 0.0)]


def test_a_ramp_is_drawn_beside_the_sweep_or_alone(tmp_path):
    ramp = Ramp(seconds=[1.0, 2.0], live=[1.0, 3.0], tokens_per_s=[50.0, 90.0], budget=[3.0, 1.0])
    draw([], str(tmp_path / "x.png"), "title", ramps={"code": {"auto": ramp, "off": ramp}})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_are_drawn_of_every_panel(tmp_path):
    places = [Place("code", 0.0, concurrency=n) for n in (1, 4)] + [Place("chat", 1.0, rate=0.5)]
    results = {
        place: {name: arm(name, 1.0, place=place) for name in ("off", "fixed:3", "algorithm1")} for place in places
    }
    draw(points(results), str(tmp_path / "x.png"), "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


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
