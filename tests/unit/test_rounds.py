"""Bookkeeping of verify rounds against traces written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.rounds import (
    Round,
    Rounds,
    accepted_length,
    conditional_acceptance,
    joined,
    survival,
    tabulate,
    verified_per_round,
)

STOP = 2


def a_round(*token_ids: int, drafted: int = 3, verified: int | None = None) -> Round:
    """token_ids: accepted drafts, then the target's own."""
    logits = [0.5 * k for k in range(drafted)]
    return Round(logits, drafted, drafted if verified is None else verified, token_ids)


@pytest.fixture
def traced() -> Rounds:
    """γ 3. Two answers: all accepted, none, one of two verified, a stop id inside the drafts; then one accepted and a stop id as
    the target's own token."""
    first = [a_round(10, 11, 12, 13), a_round(20), a_round(30, 31, verified=2), a_round(40, STOP, 42, 43)]
    return tabulate([first, [a_round(50, STOP)]], 3, (STOP,))


def test_a_trace_by_hand_is_counted_token_for_token(traced):
    assert traced.emitted.tolist() == [4, 1, 2, 2, 2]
    assert traced.accepted.tolist() == [3, 0, 1, 2, 1]
    assert traced.proposed.tolist() == [3, 3, 2, 2, 3]
    assert traced.verified.tolist() == [3, 3, 2, 3, 3]
    assert traced.answer.tolist() == [0, 0, 0, 0, 1]
    assert accepted_length(traced) == 11 / 5
    assert verified_per_round(traced) == 14 / 5


def test_drafts_behind_an_accepted_stop_id_are_judged_by_nobody(traced):
    # position 3 was proposed in rounds 0, 1 and 4, and accepted in round 0
    assert survival(traced) == [4 / 5, 2 / 5, 1 / 3]
    # position 2 is reached by rounds 0, 2, 3 and 4, position 3 by round 0 alone
    assert conditional_acceptance(traced) == [4 / 5, 2 / 4, 1 / 1]


def test_survival_is_the_product_of_conditionals_where_every_round_proposes_a_whole_block():
    random = np.random.default_rng(1)
    lengths = random.integers(0, 4, 500)
    rounds = tabulate([[a_round(*range(100, 101 + n)) for n in lengths]], 3, (STOP,))
    np.testing.assert_allclose(np.cumprod(conditional_acceptance(rounds)), survival(rounds))
    assert accepted_length(rounds) == pytest.approx(1 + sum(survival(rounds)))


def test_a_round_without_drafts_counts_as_a_round_and_says_nothing_about_positions():
    rounds = tabulate([[Round(None, 0, 0, (7,)), a_round(8, 9, drafted=1)]], 2, ())
    assert accepted_length(rounds) == 1.5
    assert survival(rounds) == [1.0, None] and conditional_acceptance(rounds) == [1.0, None]
    assert np.isnan(rounds.logits[0]).all() and rounds.logits[1, 0] == 0.0 and np.isnan(rounds.logits[1, 1])


def test_nothing_is_plain_decoding():
    empty = tabulate([], 2, ())
    assert accepted_length(empty) == 1.0 and verified_per_round(empty) == 0.0 and survival(empty) == [None, None]


def test_joined_tables_keep_their_answers_apart(traced):
    both = joined([traced, traced])
    assert len(both) == 2 * len(traced) and both.answer.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3]
    assert accepted_length(both) == accepted_length(traced)
    assert both.take(both.answer == 3).emitted.tolist() == [2]
