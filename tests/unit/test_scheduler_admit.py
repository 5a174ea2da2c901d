"""The admission rule against the reference's numbers, a slow twin, and the law it must not bend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admit import Planner, Rule, admit, algorithm1, auto, least_survivals, parse_planner, survivals, threshold
from scheduler.errors import SettingsError

pytestmark = pytest.mark.usefixtures("arithmetic")


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    width = max(len(row) for row in rows)
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=np.float64)


def lengths(rows: Sequence[Sequence[float]], seconds: Sequence[float], num_sampling: int | None = None) -> list[int]:
    return algorithm1(
        survival=padded(rows),
        num_sampling=len(rows) if num_sampling is None else num_sampling,
        step_seconds=np.asarray(seconds, dtype=np.float64),
    ).tolist()


def slow_algorithm1(rows: Sequence[Sequence[float]], seconds: Sequence[float], num_sampling: int) -> list[int]:
    """The paper's six lines."""
    candidates = sorted((-a, j, r) for r, row in enumerate(rows) for j, a in enumerate(row) if a > 0)
    best = [0] * len(rows)
    tokens, used = float(num_sampling), 0
    best_rate = tokens / seconds[0]
    for minus_a, j, r in candidates:
        tokens, used = tokens - minus_a, used + 1
        rate = tokens / seconds[used]
        if not rate > best_rate:
            break
        best_rate = rate
        best[r] = j + 1
    return best


def global_argmax(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[int]:
    """The illegal search: looks at everything before it decides on anything."""
    candidates = sorted((-a, j, r) for r, row in enumerate(rows) for j, a in enumerate(row) if a > 0)
    tokens = np.cumsum([len(rows), *[-c[0] for c in candidates]])
    best = int(np.argmax(tokens / np.asarray(seconds)[: len(tokens)]))
    chosen = [0] * len(rows)
    for _, _, r in candidates[:best]:
        chosen[r] += 1
    return chosen


def auto_lengths(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], outlook: Sequence[float] | None = None
) -> list[int]:
    """outlook: what was expected; as it turned out where None."""
    survival = padded(rows)
    expected = -np.sort(-survival.ravel()) if outlook is None else np.asarray(outlook, dtype=np.float64)
    return auto(
        survival=survival, outlook=expected, num_sampling=len(rows), step_seconds=np.asarray(seconds, dtype=np.float64)
    ).tolist()


TWO = [[0.9, 0.81, 0.729], [0.5, 0.2, 0.02]]
STAIRS = [[0.95, 0.9, 0.86, 0.82], [0.9, 0.8, 0.7, 0.6], [0.85, 0.7, 0.6, 0.5]]


def test_reference_vector_on_a_gentle_curve() -> None:
    seconds = [1 + 0.05 * tokens for tokens in range(2, 9)]
    assert lengths(TWO, seconds) == auto_lengths(TWO, seconds) == [3, 2]
    path = (2 + np.cumsum([0, 0.9, 0.81, 0.729, 0.5, 0.2, 0.02])) / np.array(seconds)
    assert path.round(4).tolist() == [1.8182, 2.5217, 3.0917, 3.5512, 3.7992, 3.8067, 3.6850]


def test_reference_vector_on_a_steep_curve() -> None:
    seconds = [1 + 0.3 * tokens for tokens in range(2, 9)]
    assert lengths(TWO, seconds) == auto_lengths(TWO, seconds) == [3, 0]
    assert (2 + 0.9 + 0.81 + 0.729) / seconds[3] == pytest.approx(1.7756, abs=1e-4)


def test_reference_staircase_traps_algorithm1_where_the_argmax_would_go_on() -> None:
    seconds = [1 + 0.5 * (-(-tokens // 4) - 1) for tokens in range(3, 16)]
    assert lengths(STAIRS, seconds) == [1, 0, 0]
    assert 3.95 / seconds[1] == pytest.approx(3.95)
    assert global_argmax(STAIRS, seconds) == [4, 3, 2]
    assert auto_lengths(STAIRS, seconds) == [4, 3, 2], "auto goes over the stair, priced by what it expected"
    assert (3 + sum(STAIRS[0] + STAIRS[1][:3] + STAIRS[2][:2])) / seconds[9] == pytest.approx(5.24, abs=5e-3)


def test_counterexample_admits_nothing_whatever_the_second_confidence() -> None:
    seconds = [1 / 1.0, 1 / 0.5, 1 / 0.45]
    assert lengths([[0.8, 0.72]], seconds) == [0]
    assert lengths([[0.8, 0.0]], seconds) == [0]
    assert global_argmax([[0.8, 0.72]], seconds) == [2]
    assert global_argmax([[0.8]], seconds) == [0]


@pytest.mark.parametrize("second", [0.0, float("nan"), 0.3, 0.9, 1.0])
@pytest.mark.parametrize("planner", ["auto", "algorithm1", "threshold:0.5"])
def test_the_second_confidence_of_the_counterexample_decides_nothing_about_the_first_token(
    planner: str, second: float
) -> None:
    """Also where it is no candidate at all: how many candidates there turned out to be is news of the drafted tokens."""
    lengths_ = admit(
        parse_planner(planner),
        confidence=np.array([[0.8, second]]),
        caps=np.array([2]),
        num_sampling=1,
        step_seconds=np.array([1.0, 2.0, 1 / 0.45]),
        outlook=np.array([0.8, 0.72]),
    )
    assert (lengths_[0] >= 1) == (planner != "algorithm1")


def served_law(planner: str, num_draws: int = 400_000) -> float:
    """P(first token is A) of the two-token example of reference 1.9: p = (.7, .3), q = (.5, .5), c_2 = .9 after A, 0 after B."""
    rng = np.random.default_rng(7)
    seconds = np.array([1.0, 1 / 0.5, 1 / 0.45])
    by_token = {}
    for token, c2 in ((0, 0.9), (1, 0.0)):
        if planner == "global":
            by_token[token] = global_argmax([[0.8, 0.8 * c2]], seconds.tolist())[0]
        elif planner == "auto":
            # what both tokens led to in earlier steps, half of the time each
            by_token[token] = auto_lengths([[0.8, 0.8 * c2]], seconds.tolist(), outlook=[0.8, 0.36])[0]
        elif planner == "one":
            by_token[token] = 1
        else:
            by_token[token] = int(
                algorithm1(survival=np.array([[0.8, 0.8 * c2]]), num_sampling=1, step_seconds=seconds)[0]
            )
    drafted = rng.integers(0, 2, num_draws)
    verified = np.where(drafted == 0, by_token[0], by_token[1]) >= 1
    accept = np.where(drafted == 0, 1.0, 0.3 / 0.5)
    accepted = rng.random(num_draws) < accept
    # The residual (p - q)+ is all on A; an unverified draft is dropped and the token comes from p.
    plain = (rng.random(num_draws) >= 0.7).astype(int)
    token = np.where(verified, np.where(accepted, drafted, 0), plain)
    return float(np.mean(token == 0))


def test_legal_planners_keep_the_target_law_and_the_illegal_search_does_not() -> None:
    assert served_law("algorithm1") == pytest.approx(0.7, abs=0.003)
    assert served_law("auto") == pytest.approx(0.7, abs=0.003)
    assert served_law("one") == pytest.approx(0.7, abs=0.003)
    assert served_law("global") == pytest.approx(0.85, abs=0.003)


confidences = st.lists(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, float("nan")])), min_size=4, max_size=4),
    min_size=1,
    max_size=6,
)
# Step seconds that rise in stairs of random height, some flat.
stairs = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5]), min_size=25, max_size=25).map(
    lambda rises: np.cumsum([1.0, *rises[1:]])
)


@settings(max_examples=150, deadline=None)
@given(confidence=confidences, seconds=stairs)
def test_fast_algorithm1_equals_the_papers_loop(confidence: list[list[float]], seconds: np.ndarray) -> None:
    c = np.array(confidence)
    survival = survivals(confidence=c, caps=np.full(len(c), 4))
    fast = algorithm1(survival=survival, num_sampling=len(c), step_seconds=seconds).tolist()
    assert fast == slow_algorithm1(survival.tolist(), seconds.tolist(), len(c))


@settings(max_examples=200, deadline=None)
@given(
    confidence=confidences,
    seconds=stairs,
    later=st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=4, max_size=4),
    planner=st.sampled_from(["auto", "algorithm1", "threshold:0.4", "fixed:2", "off"]),
    expected=st.lists(st.floats(0, 1), min_size=24, max_size=24),
    data=st.data(),
)
def test_later_confidences_never_change_whether_a_token_is_admitted(
    confidence: list[list[float]],
    seconds: np.ndarray,
    later: list[float],
    planner: str,
    expected: list[float],
    data: st.DataObject,
) -> None:
    """c[r, k + 1:] depends on token k, so it must not decide on it; and it must not decide on others' tokens before it."""
    c = np.array(confidence)
    row = data.draw(st.integers(0, len(c) - 1))
    k = data.draw(st.integers(0, 3))
    other = c.copy()
    other[row, k + 1 :] = later[k + 1 :]

    def chosen(values: np.ndarray) -> np.ndarray:
        return admit(
            parse_planner(planner),
            confidence=values,
            caps=np.full(len(values), 4),
            num_sampling=len(values) + 1,
            step_seconds=seconds,
            outlook=-np.sort(-np.array(expected[: values.size])),
        )

    assert (chosen(c)[row] >= k + 1) == (chosen(other)[row] >= k + 1)


def slow_auto(rows: Sequence[Sequence[float]], seconds: Sequence[float], outlook: Sequence[float]) -> list[int]:
    """For each candidate in order: is there a rank up to which going on pays, if what follows is as far off as this one?"""
    candidates = sorted(
        (-np.float32(a), j, r) for r, row in enumerate(rows) for j, a in enumerate(row) if np.float32(a) > 0
    )
    hoped = [max(0.01, each) for each in outlook]
    emitted = [len(rows) + sum(hoped[:k]) for k in range(len(hoped) + 1)]
    best_rate = max(tokens / time for tokens, time in zip(emitted, seconds, strict=False))
    chosen = [0] * len(rows)
    for i, (minus_a, j, r) in enumerate(candidates):
        scale = float(-minus_a) / hoped[i]
        pays = any(
            scale * sum(hoped[i:stop]) >= best_rate * (seconds[stop] - seconds[i]) * (1 - 1e-6)
            for stop in range(i + 1, len(hoped) + 1)
        )
        if not pays:
            break
        chosen[r] = j + 1
    return chosen


@settings(max_examples=150, deadline=None)
@given(confidence=confidences, seconds=stairs, expected=st.lists(st.floats(0, 1), min_size=24, max_size=24))
def test_fast_auto_equals_its_slow_twin(
    confidence: list[list[float]], seconds: np.ndarray, expected: list[float]
) -> None:
    c = np.array(confidence)
    outlook = -np.sort(-np.array(expected[: c.size]))
    survival = survivals(confidence=c, caps=np.full(len(c), 4))
    fast = auto(survival=survival, outlook=outlook, num_sampling=len(c), step_seconds=seconds).tolist()
    assert fast == slow_auto(survival.tolist(), seconds.tolist(), outlook.tolist())


@settings(max_examples=150, deadline=None)
@given(confidence=confidences, seconds=stairs)
def test_auto_reaches_the_global_optimum_where_the_present_is_as_expected(
    confidence: list[list[float]], seconds: np.ndarray
) -> None:
    c = np.array(confidence)
    survival = survivals(confidence=np.where(c > 0.05, c, np.nan), caps=np.full(len(c), 4))
    survival = np.where(survival > 0.02, survival, 0.0)
    ranked = -np.sort(-survival[survival > 0])
    chosen = auto(
        survival=survival,
        outlook=np.concatenate((ranked, np.zeros(c.size - len(ranked)))),
        num_sampling=len(c),
        step_seconds=seconds,
    )
    rates = (len(c) + np.cumsum([0.0, *ranked])) / seconds[: len(ranked) + 1]
    # ranks that nobody expects anything of count 0.01 each, so that the optimum is missed by up to so much
    missed = 0.01 * (c.size - len(ranked)) / len(c)
    assert rates[chosen.sum()] >= rates.max() * (1 - missed) - 1e-9


def test_auto_takes_more_of_a_draft_that_turned_out_better_than_expected_and_less_of_a_worse_one() -> None:
    seconds = [1 + 0.3 * tokens for tokens in range(1, 6)]
    outlook = [0.6, 0.4, 0.25, 0.15]
    assert auto_lengths([[0.6, 0.4, 0.25, 0.15]], seconds, outlook) == [2]
    assert auto_lengths([[0.95, 0.9, 0.86, 0.8]], seconds, outlook) == [4]
    assert auto_lengths([[0.1, 0.08, 0.05, 0.02]], seconds, outlook) == [0]


def test_the_price_of_a_rank_is_known_before_any_draft_is_made() -> None:
    """It has no argument through which a fresh survival could come in."""
    seconds = np.array([1.0, 1.0, 2.0, 2.0, 2.0])
    price = least_survivals(outlook=np.array([0.9, 0.8, 0.7, 0.6]), num_sampling=1, step_seconds=seconds)
    assert price[0] == 0.0, "the first is free"
    assert price[1] > 0.0 and price[2] == price[3] == 0.0, (
        "the stair is paid by its first token, the rest of it is free"
    )


def test_base_tokens_and_draft_cost_are_in_the_price() -> None:
    """A prefill chunk in the step makes drafts cheap; a slow draft, already paid, makes them worth more."""
    rows = [[0.3]]
    assert lengths(rows, [1.0, 1.4]) == [0]
    assert lengths(rows, [10.0, 10.4]) == [1]
    assert lengths(rows, [1.0 + 1.0, 1.4 + 1.0]) == [1]


def test_requests_that_sample_without_drafting_count() -> None:
    rows = [[0.5]]
    assert lengths(rows, [1.0, 1.3], num_sampling=1) == [1]
    assert lengths(rows, [1.0, 1.3], num_sampling=4) == [0]


def test_ties_go_by_position_so_that_no_prefix_is_skipped() -> None:
    assert lengths([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0]) == [2, 1]


def test_zero_survival_is_no_candidate_even_when_tokens_are_free() -> None:
    assert lengths([[0.0, 0.0], [0.5, 0.0]], [1.0] * 5) == [0, 1]


def test_equal_throughput_is_not_better() -> None:
    assert lengths([[1.0, 1.0]], [1.0, 2.0, 2.5]) == [0]


def test_nan_confidence_counts_as_zero() -> None:
    survival = survivals(confidence=np.array([[0.9, np.nan, 0.9]]), caps=np.array([3]))
    assert survival.tolist() == [[0.9, 0.0, 0.0]]
    cut = threshold(confidence=np.array([[0.9, np.nan, 0.9]]), caps=np.array([3]), least=0.5)
    assert cut.tolist() == [1]


def test_confidence_outside_its_range_is_clipped() -> None:
    survival = survivals(confidence=np.array([[1.5, 0.5, -0.2]]), caps=np.array([3]))
    assert survival.tolist() == [[1.0, 0.5, 0.0]]


def test_caps_end_a_draft_for_every_planner() -> None:
    c = np.full((2, 4), 0.9)
    caps = np.array([0, 3])
    for planner in ("algorithm1", "fixed:9", "threshold:0.1"):
        chosen = admit(parse_planner(planner), confidence=c, caps=caps, num_sampling=2, step_seconds=np.full(4, 1.0))
        assert chosen.tolist() == [0, 3], planner


def test_threshold_keeps_the_prefix_before_the_first_low_confidence() -> None:
    c = np.array([[0.9, 0.39, 0.95], [0.4, 0.4, 0.4], [0.1, 0.9, 0.9]])
    assert threshold(confidence=c, caps=np.full(3, 3), least=0.4).tolist() == [1, 3, 0]
    assert threshold(confidence=c, caps=np.full(3, 3), least=0.0).tolist() == [3, 3, 3]


def test_without_a_curve_nothing_is_trimmed() -> None:
    chosen = admit(
        Planner(Rule.ALGORITHM1),
        confidence=np.full((2, 3), 0.01),
        caps=np.array([3, 2]),
        num_sampling=2,
        step_seconds=None,
    )
    assert chosen.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("text", "planner"),
    [
        ("auto", Planner(Rule.AUTO)),
        ("algorithm1", Planner(Rule.ALGORITHM1)),
        ("off", Planner(Rule.OFF)),
        ("fixed:3", Planner(Rule.FIXED, 3)),
        (" threshold:0.35 ", Planner(Rule.THRESHOLD, 0.35)),
    ],
)
def test_planner_settings_are_read_and_written_alike(text: str, planner: Planner) -> None:
    assert parse_planner(text) == planner
    assert str(planner) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:", "fixed:0", "fixed:1000000000", "fixed:-1", "fixed:x", "threshold:1.5", "off:1", "auto:2"],
)
def test_a_wrong_planner_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(SettingsError, match=r"scheduler\.planner .* is not a planner; use auto, algorithm1, fixed:k"):
        parse_planner(text)
    with pytest.raises(SettingsError):
        parse_planner("threshold:nan")
