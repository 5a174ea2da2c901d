"""What is known of the drafter stays sound however long it is asked, and whatever it states."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.belief import Belief
from scheduler.estimates import AcceptanceEstimates

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH = 3


def live_through(belief: Belief, rounds: int, *, truth: float, stated: float, seed: int = 0) -> list[float]:
    """One request's rounds; its usual survival of the first token after each."""
    rng = np.random.default_rng(seed)
    slots, groups, caps = np.array([0]), np.array([1]), np.array([WIDTH])
    seen = []
    for step in range(rounds):
        judgement = belief.judge(slots, groups, caps, np.full((1, WIDTH), stated))
        belief.remember(judgement, caps, step)
        right = rng.random(WIDTH) < truth
        accepted = WIDTH if right.all() else int(right.argmin())
        belief.pass_step()
        belief.observe(judgement, num_drafted=caps, num_verified=caps, num_accepted=np.array([accepted]))
        seen.append(float(belief.usual(slots, caps)[0, 0]))
    return seen


@pytest.mark.parametrize("truth", [0.0, 0.6, 1.0])
def test_one_request_for_hours_neither_drifts_nor_grows(truth: float) -> None:
    belief = Belief(2, WIDTH)
    size = {name: _size(part) for name, part in vars(belief).items()}
    seen = live_through(belief, 6000, truth=truth, stated=0.7)
    early, late = np.mean(seen[1000:2000]), np.mean(seen[-1000:])
    assert late == pytest.approx(truth, abs=0.06) and late == pytest.approx(early, abs=0.04)
    assert {name: _size(part) for name, part in vars(belief).items()} == size
    assert np.all((belief.spread >= 0.0) & (belief.spread <= 1.0))


def _size(part: object) -> int:
    """Numbers held."""
    return (
        sum(each.size for each in vars(part).values() if isinstance(each, np.ndarray))
        if hasattr(part, "__dict__")
        else 0
    )


@pytest.mark.parametrize("stated", [float("nan"), 0.0, 1.0, -3.0, 7.0, float("inf")])
def test_whatever_a_drafter_states_beliefs_stay_probabilities(stated: float) -> None:
    belief = Belief(1, WIDTH)
    live_through(belief, 200, truth=0.5, stated=stated)
    slots, caps = np.array([0]), np.array([WIDTH])
    judgement = belief.judge(slots, np.array([1]), caps, np.full((1, WIDTH), stated))
    for numbers in (belief.usual(slots, caps), belief.spread, belief.outlook(judgement, slots, caps, 203)):
        assert np.all((numbers >= 0.0) & (numbers <= 1.0))


def test_a_silent_drafter_tells_nothing_apart_and_is_judged_by_its_rates() -> None:
    belief = Belief(1, WIDTH)
    live_through(belief, 400, truth=0.5, stated=float("nan"))
    judgement = belief.judge(np.array([0]), np.array([1]), np.array([WIDTH]), np.full((1, WIDTH), np.nan))
    assert belief.spread.max() < 1e-12
    assert judgement.believed[0, 0] == judgement.filled[0, 0] == pytest.approx(0.5, abs=0.15)


def test_what_a_request_showed_fades_slowly_while_it_sits_out() -> None:
    """Otherwise a request that is left out becomes like all others of its class within seconds, good or bad."""
    estimates = AcceptanceEstimates(2, 1)
    wrong = {"num_drafted": np.array([1]), "num_verified": np.array([1]), "confidence": np.full((1, 1), np.nan)}
    for _ in range(20):
        estimates.tick()
        estimates.observe(slots=np.array([0]), num_accepted=np.array([0]), **wrong)
        estimates.observe(slots=np.array([1]), num_accepted=np.array([1]), **wrong)
    for _ in range(60):
        estimates.tick()
    bad, good = estimates.rates(np.array([0, 1]))[:, 0]
    assert bad < 0.25 and good > 0.75
