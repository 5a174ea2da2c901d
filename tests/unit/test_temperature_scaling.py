"""Sequential temperature scaling: against brute force, on data whose temperatures are known, and what it must leave alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drafter.calibration import Scaling, sigmoid
from drafter.reliability import fit_of
from drafter.rounds import Rounds
from drafter.temperature_scaling import LARGEST_BIAS, TEMPERATURES, Search, fit_scaling, num_reached


def synthetic(num_rounds: int, temperatures, biases, *, seed: int = 0, spread: float = 2.0) -> Rounds:
    """Rounds whose draft k is accepted, given its predecessors were, with probability sigmoid(z / T_k + b_k)."""
    random = np.random.default_rng(seed)
    width = len(temperatures)
    logits = random.normal(0.5, spread, (num_rounds, width))
    truth = 1 / (1 + np.exp(-(logits / np.array(temperatures) + np.array(biases))))
    accepted = np.cumprod(random.random(truth.shape) < truth, axis=1).sum(axis=1)
    full = np.full(num_rounds, width)
    return Rounds(logits, full, full, accepted, accepted + 1, np.arange(num_rounds))


def error_of(scaling: Scaling, rounds: Rounds) -> float:
    return fit_of(sigmoid(scaling.logits(rounds.logits.astype(np.float32))).astype(np.float64), rounds).ece


def brute_force(rounds: Rounds, temperatures, with_bias: bool) -> tuple[list[float], list[float]]:
    """In words of the paper, in plain loops; the bias by walking through all of them in steps of 0.001."""
    num_rounds, width = rounds.logits.shape
    survival = [1.0] * num_rounds
    chosen = []
    for k in range(width):
        rows = [n for n in range(num_rounds) if rounds.proposed[n] > k]
        reached = np.array([n for n in rows if rounds.accepted[n] >= k])
        hits = sum(rounds.accepted[n] > k for n in reached)
        tried = []
        for t in temperatures:
            b = 0.0
            if with_bias:
                biases = np.arange(-4.0, 4.0005, 0.001)
                sums = (1 / (1 + np.exp(-(rounds.logits[reached, k, None] / t + biases)))).sum(axis=0)
                b = float(biases[np.abs(sums - hits).argmin()])
            bins = [[0.0, 0] for _ in range(20)]
            for n in rows:
                p = survival[n] / (1 + math.exp(-(rounds.logits[n, k] / t + b)))
                bins[min(int(p * 20), 19)][0] += p
                bins[min(int(p * 20), 19)][1] += rounds.accepted[n] > k
            tried.append((sum(abs(p - y) for p, y in bins) / len(rows), abs(math.log(t)), t, b))
        _, _, t, b = min(tried)
        survival = [s / (1 + math.exp(-(rounds.logits[n, k] / t + b))) for n, s in enumerate(survival)]
        chosen.append((t, b))
    return [t for t, _ in chosen], [b for _, b in chosen]


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_fit_is_what_brute_force_finds(with_bias):
    rounds = synthetic(400, (2.0, 0.5, 1.0), (0.3, -0.5, 0.0), seed=4)
    # a block may be cut short
    proposed = np.where(np.arange(400) % 5 == 0, 2, 3)
    accepted = np.minimum(rounds.accepted, proposed)
    rounds = Rounds(rounds.logits, rounds.verified, proposed, accepted, rounds.emitted, rounds.answer)
    search = Search(temperatures=(0.4, 0.7, 1.0, 1.7, 2.6), with_bias=with_bias, least_rounds=1)
    found = fit_scaling(rounds, search)
    temperatures, biases = brute_force(rounds, search.temperatures, with_bias)
    assert list(found.temperatures) == temperatures
    np.testing.assert_allclose(found.biases, biases, atol=2e-3)
    assert any(found.biases) == with_bias


def test_known_temperatures_are_recovered():
    known = (2.0, 0.5, 1.0, 1.5)
    found = fit_scaling(synthetic(30_000, known, (0.0,) * 4), Search(with_bias=False))
    assert found.biases == (0.0,) * 4
    np.testing.assert_allclose(np.log2(found.temperatures), np.log2(known), atol=0.35)


def test_calibration_holds_on_rounds_it_was_not_fitted_on():
    known = (1.8, 0.6, 1.3)
    fitted, held_out = (synthetic(20_000, known, (0.0,) * 3, seed=s) for s in (1, 2))
    plain = Scaling.of_temperatures(1.0, 1.0, 1.0)
    assert error_of(plain, held_out) > 0.04
    assert error_of(fit_scaling(fitted, Search(with_bias=False)), held_out) < 0.012


def test_a_shifted_head_needs_a_bias_and_gets_one():
    """The mistakes of a head that is off by a constant lie on both sides of one half: no temperature mends both."""
    fitted, held_out = (synthetic(12_000, (1.0, 1.0), (-1.0, 0.5), seed=s) for s in (1, 2))
    with_bias = fit_scaling(fitted)
    np.testing.assert_allclose(with_bias.biases, (-1.0, 0.5), atol=0.2)
    temperature_only = fit_scaling(fitted, Search(with_bias=False))
    assert temperature_only.biases == (0.0, 0.0)
    assert error_of(with_bias, held_out) < 0.015 < 0.04 < error_of(temperature_only, held_out)


def test_a_position_that_is_always_right_gets_a_bias_that_ends():
    logits = np.zeros((300, 1))
    one = np.ones(300, dtype=np.int64)
    found = fit_scaling(Rounds(logits, one, one, one, one + 1, np.arange(300)))
    assert found.biases == (LARGEST_BIAS,)


def test_a_calibrated_head_is_left_at_temperature_one_on_a_tie():
    """Certain and right: every temperature has the same error."""
    logits = np.full((300, 2), 500.0)
    two = np.full(300, 2)
    rounds = Rounds(logits, two, two, two, two + 1, np.arange(300))
    assert fit_scaling(rounds, Search(with_bias=False)) == Scaling((1.0, 1.0), (0.0, 0.0))


def cut(rounds: Rounds, width: int, from_round: int) -> Rounds:
    """Rounds from that one on propose `width` drafts."""
    short = np.where(np.arange(len(rounds)) < from_round, rounds.width, width)
    return Rounds(rounds.logits, short, short, np.minimum(rounds.accepted, short), rounds.emitted, rounds.answer)


def test_positions_that_few_rounds_reached_inherit_from_the_one_before_or_from_an_earlier_fit():
    rounds = cut(synthetic(300, (3.0, 3.0, 3.0), (0.5, 0.5, 0.5)), 1, from_round=60)
    assert num_reached(rounds)[0] == 300 and max(num_reached(rounds)[1:]) < 50
    fitted = fit_scaling(cut(rounds, 1, 0))
    assert fitted.temperatures[0] > 1.5 and fitted.biases[0] > 0
    assert fit_scaling(rounds) == Scaling(fitted.temperatures[:1] * 3, fitted.biases[:1] * 3)
    earlier = Scaling((0.5, 0.6, 0.7), (-0.1, -0.2, -0.3))
    assert fit_scaling(rounds, known=earlier) == Scaling(
        (fitted.temperatures[0], 0.6, 0.7), (fitted.biases[0], -0.2, -0.3)
    )


def test_a_first_position_that_few_rounds_reached_keeps_its_own_confidence():
    rounds = synthetic(40, (3.0, 3.0), (0.5, 0.5))
    assert fit_scaling(rounds) == Scaling.of_temperatures(1.0, 1.0)


def test_a_round_tells_about_a_position_when_it_proposed_it_and_accepted_what_came_before():
    proposed, accepted = np.array([3, 3, 3, 2, 1]), np.array([0, 1, 3, 2, 1])
    rounds = Rounds(np.zeros((5, 3)), proposed, proposed, accepted, accepted + 1, np.arange(5))
    assert num_reached(rounds) == [5, 3, 1]


def test_the_grid_is_symmetric_in_the_logarithm_and_holds_one_exactly():
    assert 1.0 in TEMPERATURES and (TEMPERATURES[0], TEMPERATURES[-1]) == (0.25, 4.0)
    np.testing.assert_allclose(np.array(TEMPERATURES) * np.array(TEMPERATURES)[::-1], 1.0)


def test_rounds_without_confidence_are_refused():
    rounds = synthetic(300, (1.0,), (0.0,))
    with pytest.raises(ValueError, match="without confidence"):
        fit_scaling(
            Rounds(
                np.full((300, 1), np.nan),
                *(getattr(rounds, n) for n in ("verified", "proposed", "accepted", "emitted", "answer")),
            )
        )
