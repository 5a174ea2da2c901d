"""The simulator against numbers worked out by hand, and the real scheduler in it: fairness, gating, load, regret, disorder."""

from __future__ import annotations

import pytest

from scheduler.curves import constant
from scheduler.simulate import Machine, Simulation, Window
from scheduler.simulate_load import Clients
from scheduler.simulate_traces import SyntheticTraces, TextClass, Workload


def fixed_length(rate: float, *, prompt: float = 4, output: float = 100_000) -> Workload:
    """Answers that all run to the longest allowed length."""
    return Workload(((TextClass("x", rate, mean_prompt=prompt, mean_output=output), 1.0),))


def simulate(machine, planner, workload, clients, window, *, seed=0, width=7, max_output=512):
    traces = SyntheticTraces(workload, seed=seed, width=width, max_output=max_output)
    load = clients if isinstance(clients, Clients) else Clients([(0.0, clients)])
    return Simulation(machine, planner, traces, load, seed=seed).run(window)


@pytest.mark.parametrize("clients", [1, 5])
def test_plain_decoding_at_constant_cost_gives_one_token_a_step_and_request(clients):
    outcome = simulate(Machine(constant(0.01)), "off", fixed_length(1.0), clients, Window(1.0, 4.0), max_output=10_000)
    assert outcome.tokens_per_s == pytest.approx(100 * clients, rel=0.01)
    assert outcome.user_tokens_per_s == 0.0, "nobody finished, so nobody's pace is known"


@pytest.mark.parametrize("k", [1, 3, 7])
def test_right_drafts_at_constant_cost_give_k_plus_one_tokens_a_step(k):
    machine = Machine(constant(0.01, draft_s=0.002))
    outcome = simulate(machine, f"fixed:{k}", fixed_length(1.0), 3, Window(0.6, 6.0), max_output=10_000)
    assert outcome.tokens_per_s == pytest.approx(3 * (k + 1) / 0.012, rel=0.01)
    assert (outcome.accept_length, outcome.budget) == (k + 1, k)
