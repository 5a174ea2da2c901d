"""Two cohorts in flight on the virtual clock: the same text as one step at a time, sooner where verifying costs by the token."""

from __future__ import annotations

from functools import lru_cache

import pytest

from scheduler.curves import CostLaw, linear
from scheduler.simulate import Machine, Simulation, Window
from scheduler.simulate_load import Clients
from scheduler.simulate_report import Outcome
from scheduler.simulate_traces import SyntheticTraces, TextClass, Workload

# Long answers, so that what is compared is decoding.
TEXTS = Workload(((TextClass("math", 0.9, 4, 400), 0.5), (TextClass("chat", 0.75, 4, 400), 0.5)))
PLANNERS = ("off", "fixed:3", "threshold:0.5", "algorithm1", "auto")
# Drafts of all take longer than what a step costs whoever is in it.
BY_TOKEN = CostLaw(
    "by token", lambda work: 5e-3 + 2e-4 * work.num_tokens, lambda r, w: 2e-3 + 1e-3 * r if r and w else 0.0
)
BY_STEP = linear(fixed_s=0.02, token_s=1e-5, draft_s=0.005)


@lru_cache(maxsize=32)
def serve(law: CostLaw, planner: str, depth: int, clients: int = 8) -> tuple[Outcome, dict[str, list[int]]]:
    """What it took, and each request's text so far."""
    machine = Machine(law, pipeline_depth=depth, check_integrity=True)
    simulation = Simulation(machine, planner, SyntheticTraces(TEXTS, seed=3), Clients([(0.0, clients)]))
    texts: dict[str, list[int]] = {}
    apply = simulation.core.apply

    def read(verdicts):
        deltas = apply(verdicts)
        for delta in deltas:
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
        return deltas

    simulation.core.apply = read
    return simulation.run(Window(0.3, 1.5)), texts


@pytest.mark.parametrize("planner", PLANNERS)
def test_two_cohorts_serve_the_same_text_as_one_step_at_a_time_and_as_plain_decoding(planner):
    plain = serve(BY_TOKEN, "off", 1)[1]
    for depth in (1, 2):
        texts = serve(BY_TOKEN, planner, depth)[1]
        assert len(texts) >= 8
        for name, text in texts.items():
            both = min(len(text), len(plain.get(name, ())))
            assert text[:both] == plain.get(name, [])[:both]
        assert sum(len(text) for text in texts.values()) > 500


@pytest.mark.parametrize("planner", ["fixed:3", "threshold:0.5", "algorithm1", "auto"])
def test_where_verifying_costs_by_the_token_a_draft_that_is_hidden_behind_it_is_won(planner):
    outcome, alone = serve(BY_TOKEN, planner, 2)[0], serve(BY_TOKEN, planner, 1)[0]
    assert outcome.overlapped > 0.8
    assert outcome.tokens_per_s > 1.1 * alone.tokens_per_s
    assert outcome.longest_wait <= 3, "each cohort gets its tokens every other step"


def test_two_cohorts_are_not_formed_where_plain_decoding_beats_them_unless_drafts_are_fixed():
    """Nothing but tokens costs anything: two halves with drafts beat all with drafts, and lose to all without."""
    law = CostLaw(
        "tokens", lambda work: 1e-3 + 1e-3 * work.num_tokens, lambda r, w: 1e-3 + 5e-4 * r * w if r and w else 0.0
    )
    auto, off = serve(law, "auto", 2)[0], serve(law, "off", 2)[0]
    assert auto.overlapped < 0.05 and auto.tokens_per_s > 0.98 * off.tokens_per_s
    assert serve(law, "fixed:3", 2)[0].overlapped > 0.8


@pytest.mark.parametrize("planner", PLANNERS)
def test_where_a_step_costs_the_same_for_half_as_many_all_go_in_one(planner):
    outcome, alone = serve(BY_STEP, planner, 2)[0], serve(BY_STEP, planner, 1)[0]
    assert outcome.overlapped < 0.05
    assert outcome.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.02)


def test_without_drafts_there_is_nothing_to_hide_and_with_one_request_nothing_to_hide_it_behind():
    assert serve(BY_TOKEN, "off", 2)[0].overlapped == 0.0
    assert serve(BY_TOKEN, "fixed:3", 2, clients=1)[0].overlapped == 0.0


def test_the_two_devices_take_as_long_as_the_longer_of_them():
    """Everything is right and 4 tokens a round: a cohort of 4 is verified in 8.2 ms while the other drafts in 6."""
    workload = Workload(((TextClass("math", 1.0, 4, 1e9), 1.0),))
    machine = Machine(BY_TOKEN, pipeline_depth=2)
    traces = SyntheticTraces(workload, max_output=20_000)
    outcome = Simulation(machine, "fixed:3", traces, Clients([(0.0, 8)])).run(Window(0.2, 1.0))
    assert outcome.tokens_per_s == pytest.approx(4 * 4 / 0.0082, rel=0.02)
    one = Simulation(Machine(BY_TOKEN), "fixed:3", traces, Clients([(0.0, 8)])).run(Window(0.2, 1.0))
    assert one.tokens_per_s == pytest.approx(8 * 4 / (0.0114 + 0.010), rel=0.02)
