"""The simulator against numbers worked out by hand and against its own promises: same text for every planner, honest clocks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from scheduler.curves import LAWS, StepWork, constant, cpu, gpu, linear, stairs
from scheduler.errors import SettingsError
from scheduler.simulate import Machine, Noise, Simulation, Window, compare, window_of
from scheduler.simulate_load import Clients, Poisson, parse_load
from scheduler.simulate_report import budget_by_load, regrets
from scheduler.simulate_traces import WORKLOADS, Belief, RecordedTraces, SyntheticTraces, TextClass, Workload
from scheduler.simulate_workers import SimulatedDrafter, SimulatedTarget, exact_curve, measured_curve


def fixed_length(rate: float, *, output: float = 1e9, kind: str = "x") -> Workload:
    """Answers that all run to the longest allowed length."""
    return Workload(((TextClass(kind, rate, mean_prompt=4, mean_output=output), 1.0),))


def simulate(machine, planner, workload, load, window, *, seed=0, max_output=512):
    traces = SyntheticTraces(workload, seed=seed, max_output=max_output)
    load = load if isinstance(load, Clients | Poisson) else Clients([(0.0, load)])
    return Simulation(machine, planner, traces, load, seed=seed).run(window)


@pytest.mark.parametrize("clients", [1, 5])
def test_plain_decoding_at_constant_cost_gives_one_token_a_step_and_request(clients):
    outcome = simulate(Machine(constant(0.01)), "off", fixed_length(1.0), clients, Window(1.0, 4.0), max_output=10_000)
    assert outcome.tokens_per_s == pytest.approx(100 * clients, rel=0.01)
    assert outcome.user_tokens_per_s == 0.0, "nobody finished, so nobody's pace is known"


@pytest.mark.parametrize("k", [1, 3, 7])
def test_right_drafts_at_constant_cost_give_k_plus_one_tokens_a_step(k):
    machine = Machine(constant(0.01, draft_s=0.002))
    outcome = simulate(machine, f"fixed:{k}", fixed_length(1.0), 3, Window(0.6, 3.0), max_output=10_000)
    assert outcome.tokens_per_s == pytest.approx(3 * (k + 1) / 0.012, rel=0.02)
    assert (outcome.accept_length, outcome.budget) == (k + 1, k + 1)


def test_drafts_of_half_the_tokens_at_linear_cost_give_the_throughput_of_the_formula():
    """Acceptance is the same everywhere, so a round of width 2 is worth 1 + c + c^2 tokens."""
    even = TextClass("x", 0.5, mean_prompt=4, mean_output=1e9, request_sd=0, drift_sd=0, token_sd=0, depth_loss=0)
    machine = Machine(linear(fixed_s=0.01, token_s=0.001, draft_s=0.002))
    outcome = simulate(machine, "fixed:2", Workload(((even, 1.0),)), 4, Window(0.5, 12.0), max_output=10_000)
    assert outcome.accept_length == pytest.approx(1.75, rel=0.03)
    assert outcome.tokens_per_s == pytest.approx(4 * 1.75 / (0.012 + 0.001 * 12), rel=0.03)


def test_host_time_is_part_of_every_step_and_a_slower_machine_is_slower():
    law = replace(constant(0.01), host_s=lambda live: 0.01)
    outcome = simulate(Machine(law), "off", fixed_length(1.0), 2, Window(1.0, 4.0), max_output=10_000)
    assert outcome.tokens_per_s == pytest.approx(100, rel=0.01)


def test_times_to_the_first_token_and_per_token_are_those_of_the_law():
    outcome = simulate(Machine(constant(0.01)), "off", fixed_length(0.5), 2, Window(0.0, 10.0), max_output=100)
    assert outcome.ttft_s == (pytest.approx(0.01), pytest.approx(0.01))
    assert outcome.tpot_s == (pytest.approx(0.01), pytest.approx(0.01))
    assert outcome.user_tokens_per_s == pytest.approx(100)
    assert outcome.num_answers == 20


def test_requests_stop_where_the_target_stops_not_where_they_might():
    workload = Workload(((TextClass("x", 0.9, mean_prompt=4, mean_output=30), 1.0),))
    traces = SyntheticTraces(workload)
    lengths = [traces.open(index).num_output for index in range(200)]
    for planner in ("off", "fixed:7"):
        outcome = simulate(Machine(constant(0.01)), planner, workload, Poisson(200.0), Window(0.0, 0.9))
        assert outcome.num_answers > 40
    assert 4 <= min(lengths) < max(lengths) < 512 and 20 < np.mean(lengths) < 40


def test_every_planner_meets_the_same_requests_and_the_same_text():
    """The outcome at an output position is the request's own: a draft from one place agrees with one from the place before."""
    traces = SyntheticTraces(WORKLOADS["mixed"], seed=5)
    again = SyntheticTraces(WORKLOADS["mixed"], seed=5)
    other = SyntheticTraces(WORKLOADS["mixed"], seed=6)
    numbers = list(range(30))
    shapes = [traces.open(n) for n in numbers]
    assert shapes == [again.open(n) for n in reversed(numbers)][::-1] != [other.open(n) for n in numbers]
    for position in (1, 17, 300):
        places = [position] * len(numbers)
        confidence, right = traces.draft(numbers, places, 7)
        assert np.array_equal(right, again.draft(numbers, places, 7).num_right)
        assert np.array_equal(confidence, again.draft(numbers, places, 7).confidence)
        assert np.array_equal(np.minimum(right, 3), traces.draft(numbers, places, 3).num_right)
    flat = replace(WORKLOADS["code"].mix[0][0], depth_loss=0.0)
    level = SyntheticTraces(Workload(((flat, 1.0),)), seed=5)
    for n in numbers:
        level.open(n)
    here, next_ = (level.draft(numbers, [p] * len(numbers), 7).num_right for p in (10, 11))
    assert np.array_equal(next_[(here > 0) & (here < 7)], here[(here > 0) & (here < 7)] - 1)


@pytest.mark.parametrize(("kind", "rate"), [("math", 0.905), ("code", 0.886), ("chat", 0.735)])
def test_confidences_are_calibrated_and_acceptance_is_as_the_paper_has_it(kind, rate):
    traces = SyntheticTraces(WORKLOADS[kind], seed=1)
    numbers = list(range(600))
    for n in numbers:
        traces.open(n)
    stated, right = [], []
    for position in range(1, 100, 9):
        confidence, num_right = traces.draft(numbers, [position] * len(numbers), 7)
        assert confidence is not None
        stated.append(confidence)
        right.append(num_right[:, None] > np.arange(7))
    claims, hits = np.concatenate(stated), np.concatenate(right)
    assert hits[:, 0].mean() == pytest.approx(rate, abs=0.025)
    for low in np.arange(0.1, 1.0, 0.2):
        chosen = (claims[:, 0] >= low) & (claims[:, 0] < low + 0.2)
        assert hits[chosen, 0].mean() == pytest.approx(claims[chosen, 0].mean(), abs=0.06)
    reached = hits[:, 2]
    assert hits[reached, 3].mean() == pytest.approx(rate, abs=0.06)


def test_a_belief_is_about_what_is_said_not_about_what_is_right():
    numbers, plain = list(range(200)), SyntheticTraces(WORKLOADS["mixed"], seed=2)
    bold = SyntheticTraces(replace(WORKLOADS["mixed"], belief=Belief(bias=2.0)), seed=2)
    telling = SyntheticTraces(WORKLOADS["telling"], seed=2)
    for n in numbers:
        for traces in (plain, bold, telling):
            traces.open(n)
    drafts = [traces.draft(numbers, [3] * len(numbers), 7) for traces in (plain, bold, telling)]
    assert np.array_equal(drafts[0].num_right, drafts[1].num_right) and np.array_equal(
        drafts[0].num_right, drafts[2].num_right
    )
    assert (drafts[1].confidence > drafts[0].confidence).mean() > 0.99
    for row, right in enumerate(drafts[0].num_right):
        same = drafts[2].confidence[row] == drafts[0].confidence[row]
        assert same[: right + 1].all(), "while every token is right, both say the same"
        assert right >= 6 or not same[right + 1], "what follows a wrong token is told apart"


def test_some_confidences_are_nan_where_the_drafter_says_so():
    traces = SyntheticTraces(WORKLOADS["some-nan"], seed=2)
    for n in range(300):
        traces.open(n)
    confidence = traces.draft(range(300), [3] * 300, 4).confidence
    assert np.isnan(confidence).any(axis=1).mean() == pytest.approx(0.3, abs=0.08)
    assert np.array_equal(np.isnan(confidence).any(axis=1), np.isnan(confidence).all(axis=1))


def recorded(*rounds, **more):
    return {
        "kind": "code",
        "prompt": 9,
        "rounds": [dict(zip(("confidence", "verified", "accepted"), r, strict=True)) for r in rounds],
        **more,
    }


def test_recorded_rounds_are_replayed_as_they_were():
    line = recorded(([0.9, 0.8, 0.7], 3, 1), ([0.6, 0.5, 0.4], 2, 2), ([0.3, 0.2, 0.1], 0, 0))
    traces = RecordedTraces([line], width=3)
    shape = traces.open(0)
    assert (shape.kind, shape.num_prompt, shape.num_output) == ("code", 9, 2 + 3 + 1)
    draft = traces.draft([0], [0], 3)
    assert draft.num_right.tolist() == [1] and draft.confidence.tolist() == [pytest.approx([0.9, 0.8, 0.7])]
    inside = traces.draft([0], [1], 3)
    assert inside.num_right.tolist() == [0] and inside.confidence[0, 0] == pytest.approx(0.8)
    second = traces.draft([0], [2], 3)
    assert second.num_right[0] >= 2 and second.confidence.tolist() == [pytest.approx([0.6, 0.5, 0.4])]
    third = [RecordedTraces([line], seed=seed, width=3) for seed in range(300)]
    for each in third:
        each.open(0)
    unverified = [each.draft([0], [5], 3).num_right[0] for each in third]
    assert np.mean(np.array(unverified) > 0) == pytest.approx(0.3, abs=0.1), "by its confidence"
    assert traces.draft([0], [99], 2).num_right[0] <= 2, "past the recording its last round goes on"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "KeyError"),
        (recorded(), "it has no rounds"),
        (recorded(([0.5], 1, 2)), "2 accepted of 1 verified"),
        (recorded(([0.5], 2, 1)), "1 accepted of 2 verified of 1 drafted"),
        (recorded((["x"], 1, 1)), "ValueError"),
        ([], "no request"),
    ],
)
def test_a_line_that_is_no_trace_is_named(line, message):
    with pytest.raises(
        SettingsError, match=f"line 2 of the traces is no request: .*{message}" if message != "no request" else message
    ):
        RecordedTraces([recorded(([0.5], 1, 1)), line])
    with pytest.raises(SettingsError, match="holds no requests"):
        RecordedTraces([])


def test_a_trace_file_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(SettingsError, match="not JSON lines"):
        RecordedTraces.read(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n" + json.dumps(recorded(([0.5], 1, 1))) + "\n")
    assert RecordedTraces.read(tmp_path / "x.jsonl").open(7).kind == "code"


def test_clients_come_and_go_and_each_asks_again_when_it_was_answered():
    load = Clients([(0.0, 2), (10.0, 4), (20.0, 1)])
    assert load.due(0.0) == [0, 1] and load.due(1.0) == []
    load.finished(1)
    assert load.due(1.0) == [1 + 4]
    assert load.due(10.0) == [2, 3]
    for index in (0, 5, 2, 3):
        load.finished(index)
    assert load.due(20.0) == [0 + 4] and load.due(99.0) == []


def test_arrivals_are_poisson_and_the_same_for_every_planner():
    first, second = Poisson(50.0, seed=1), Poisson(50.0, seed=1)
    arrivals = [first.due(t) for t in np.arange(0.0, 100.0, 0.5)]
    assert [index for each in arrivals for index in each] == second.due(99.5)
    counts = np.array([len(each) for each in arrivals])
    assert counts.mean() == pytest.approx(25, rel=0.05) and counts.var() == pytest.approx(25, rel=0.3)
    assert first.next_s(99.5) > 99.5


def test_loads_are_read():
    assert parse_load("16", seconds=9.0, seed=0).most == 16
    ramp = parse_load("1-64-1", seconds=10.0, seed=0)
    assert [ramp.level(t) for t in (0.0, 5.0, 10.0, 99.0)] == [1, 64, 1, 1]


@pytest.mark.parametrize("name", list(LAWS))
def test_laws_never_give_more_for_less(name):
    law = LAWS[name]()
    for context in (0, 512):
        works = [StepWork(n, 1, context, n * context) for n in range(1, 1200)]
        seconds = [law.verify_s(work) for work in works]
        assert min(seconds) > 0 and np.all(np.diff(seconds) >= -1e-12)
    drafts = np.array([[law.draft_s(r, w) for w in range(1, 8)] for r in range(1, 300)])
    assert drafts.min() > 0 and np.all(np.diff(drafts, axis=0) >= -1e-12) and np.all(np.diff(drafts, axis=1) >= -1e-12)
    assert law.draft_s(0, 7) == law.draft_s(7, 0) == 0.0


def test_the_staircase_is_the_reference_s():
    """SPS = 1 / (1 + 0.5 (ceil(B / 4) - 1))."""
    law = stairs(first_s=1.0)
    assert [law.verify_s(StepWork(n, 1, 0, 0)) for n in (1, 4, 5, 8, 9, 12, 13)] == [1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 2.5]


def workers(law, max_live=64):
    target = SimulatedTarget(law, max_live=max_live, max_request_tokens=1000)
    return target, SimulatedDrafter(law, SyntheticTraces(WORKLOADS["mixed"]), target, variable_width=True)


def test_an_exact_curve_is_the_law_and_a_measured_one_is_the_law_where_it_was_measured():
    law = gpu()
    exact = exact_curve(*workers(law), max_live=64, prefill_chunk=256)
    measured = measured_curve(*workers(law), max_live=64, prefill_chunk=256)
    for n in (1, 65, 128, 129, 512):
        at = StepWork(n, -(-n // 8), -(-n // 8) * 256 + n, n * 256)
        assert exact.verify_seconds(n, 1, 256)[0] == pytest.approx(law.verify_s(at))
    assert measured.verify_seconds(64, 1, 256)[0] == pytest.approx(
        law.verify_s(StepWork(64, 8, 8 * 256 + 64, 64 * 256))
    )
    assert measured.draft_seconds(8, 7) == exact.draft_seconds(8, 7) == law.draft_s(8, 7)


def test_noise_is_the_same_for_every_planner_and_outliers_are_rare_and_long():
    noise = Noise(spread=0.1, outlier_share=0.02, outlier_factor=10.0)
    runs = [simulate(Machine(constant(0.01), noise), "off", fixed_length(1.0), 1, Window(0.0, 20.0)) for _ in range(2)]
    assert runs[0].history == runs[1].history
    gaps = np.diff([step.now for step in runs[0].history])
    assert (gaps > 0.05).mean() == pytest.approx(0.02, abs=0.01)
    assert np.log(gaps[gaps < 0.05] / 0.01).std() == pytest.approx(0.1, abs=0.015)


def test_a_run_is_the_same_twice():
    def run():
        machine, window = Machine(cpu(), Noise(spread=0.05)), Window(0.5, 2.0)
        outcome = simulate(machine, "algorithm1", WORKLOADS["mixed"], 6, window, seed=4)
        return replace(outcome, wall_s=0.0, plan_wall_s=0.0)

    assert run() == run()


def test_regret_is_against_the_best_of_off_and_fixed():
    machine = Machine(constant(0.01, draft_s=0.002))
    outcomes = compare(
        machine,
        ("off", "fixed:1", "fixed:3", "threshold:0.0"),
        lambda: SyntheticTraces(fixed_length(1.0), max_output=10_000),
        lambda: Clients([(0.0, 2)]),
        Window(0.3, 1.5),
    )
    ratios = regrets(outcomes)
    assert ratios["fixed:3"] == 1.0 and ratios["threshold:0.0"] > 1.8, "all 7 right drafts are no fixed arm's here"
    assert ratios["off"] == pytest.approx(0.012 / 0.04, rel=0.05)
    assert regrets({"threshold:0.0": outcomes["threshold:0.0"]}) == {}


def test_the_budget_is_told_by_load():
    outcome = simulate(
        Machine(constant(0.01)), "fixed:2", fixed_length(1.0), Clients([(0.0, 1), (2.0, 6)]), Window(0.0, 2.0)
    )
    assert outcome.budget_by_load == budget_by_load(outcome.history)
    assert set(outcome.budget_by_load) == {1, 2, 4, 8} and min(outcome.budget_by_load.values()) > 2.9


def test_requests_that_the_scheduler_refuses_are_counted_and_their_clients_go_on():
    outcome = simulate(Machine(constant(1.0)), "off", fixed_length(1.0), Poisson(2000.0), Window(0.0, 2.0))
    assert outcome.num_refused > 1000 and outcome.num_tokens > 0


def test_a_window_is_as_long_as_plain_decoding_needs():
    assert window_of(Machine(constant(0.01)), clients=8, warm_tokens=50, counted_tokens=100) == Window(0.5, 1.0)
    assert window_of(Machine(constant(0.01)), clients=8) == Window(1.28, pytest.approx(10.24))
