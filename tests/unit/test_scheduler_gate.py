"""Draft or not: what drafting may cost when it does not help, and that it is never given up where it does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from scheduler.admit import algorithm1, survivals
from scheduler.estimates import AcceptanceEstimates
from scheduler.forecast import Prices
from scheduler.gate import PROBE_SHARE, Choice, DraftGate
from scheduler.refinement import RefinedCurve
from scheduler.throughput import CostCurve, CurvePoints

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH = 7

# Milliseconds of the demo target on two cores, and a drafter whose γ rows per request cost about as much as the target's.
LAPTOP = CostCurve(
    CurvePoints(
        tokens=(1, 8, 16, 32, 64, 128, 256),
        contexts=(256,),
        verify_s=((0.014, 0.015, 0.019, 0.029, 0.057, 0.110, 0.215),),
        requests=(1, 4, 16, 32),
        widths=(1, 7),
        draft_s=((0.003, 0.005), (0.004, 0.009), (0.008, 0.026), (0.014, 0.048)),
    ),
    measured_at=0.0,
)


@dataclass
class Economy:
    """A fixed set of requests for ever; acceptance[r] is the chance that a draft of request r is right, given the last was.

    claims: the confidences it states, the truth where None; confident False states none. known: what is believed of the curve and
    learns from steps; None: all.
    """

    acceptance: np.ndarray
    variable_width: bool = True
    confident: bool = True
    curve: CostCurve = LAPTOP
    known: RefinedCurve | None = None
    claims: np.ndarray | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def __post_init__(self) -> None:
        self.num_requests = len(self.acceptance)
        self.slots = np.arange(self.num_requests)
        self.gate = DraftGate(WIDTH, variable_width=self.variable_width)
        self.estimates = AcceptanceEstimates(self.num_requests, WIDTH)
        self.last_drafted = np.zeros(self.num_requests, dtype=np.int64)
        self.step_number = 0
        self.num_drafted = np.zeros(self.num_requests, dtype=np.int64)
        self.num_shut = self.num_trials = 0

    @property
    def _claims(self) -> np.ndarray:
        return self.acceptance if self.claims is None else self.claims

    @property
    def plain_rate(self) -> float:
        return self.num_requests / self.curve.verify_seconds(self.num_requests, 1, 256)[0]

    def step(self) -> tuple[int, float]:
        """Tokens and seconds of one step."""
        self.step_number += 1
        count = self.num_requests
        caps = np.full(count, WIDTH)
        known = self.known or self.curve
        verify_s = known.verify_seconds(count, count * WIDTH + 1, 256)
        choice = self.gate.choose(
            step=self.step_number,
            survival=survivals(confidence=self.estimates.rates(self.slots), caps=caps),
            idle_steps=self.step_number - self.last_drafted,
            prices=Prices(
                num_sampling=count,
                verify_seconds=verify_s,
                draft_seconds=known.draft_table(count, WIDTH),
                looks_ahead=self.known is not None,
            ),
        )
        self.num_shut += choice.shut
        self.num_trials += choice.trial
        rows = choice.rows
        self.last_drafted[rows] = self.step_number
        self.num_drafted[rows] += 1
        self.estimates.tick()
        if not len(rows):
            true_s = float(self.curve.verify_seconds(count, 1, 256)[0])
            self.learn(count, true_s, choice, 0.0)
            return count, true_s
        draft_s = self.curve.draft_seconds(len(rows), choice.width)
        claimed = np.full((len(rows), WIDTH), np.nan)
        claimed[:, : choice.width] = (
            self._claims[rows][:, None] if self.confident else self.estimates.rates(rows)[:, : choice.width]
        )
        survival = survivals(confidence=claimed, caps=np.full(len(rows), choice.width))
        verified = algorithm1(survival=survival, num_sampling=count, step_seconds=verify_s + draft_s)
        if choice.probe >= 0:
            verified = np.where(rows == choice.probe, np.maximum(verified, 1), verified)
        if choice.trial:
            verified = np.maximum(verified, 1)
        right = self.rng.random((len(rows), WIDTH)) < self.acceptance[rows][:, None]
        accepted = np.minimum(np.where(right.all(axis=1), WIDTH, right.argmin(axis=1)), verified)
        self.estimates.observe(
            slots=rows,
            num_drafted=np.full(len(rows), choice.width),
            num_verified=verified,
            num_accepted=accepted,
            confidence=claimed if self.confident else np.full_like(claimed, np.nan),
        )
        if choice.probe >= 0:
            self.gate.probed(self.step_number, success=bool(accepted[rows == choice.probe][0] > 0))
        num_tokens = count + int(verified.sum())
        true_s = float(self.curve.verify_seconds(num_tokens, 1, 256)[0])
        if choice.trial:
            predicted_s = known.draft_seconds(len(rows), choice.width) + known.verify_seconds(num_tokens, 1, 256)[0]
            faster = float(predicted_s) / (draft_s + true_s)
            self.gate.tried(self.step_number, success=self.gate.margin * faster > 1.0)
        self.learn(num_tokens, true_s, choice, draft_s)
        return count + int(accepted.sum()), draft_s + true_s

    def learn(self, num_tokens: int, verify_s: float, choice: Choice, draft_s: float) -> None:
        if self.known is not None:
            self.known.observe(
                num_tokens=num_tokens,
                context_len=256,
                verify_s=verify_s,
                num_drafting=len(choice.rows),
                width=choice.width,
                draft_s=draft_s,
            )

    def run(self, steps: int) -> float:
        """Tokens per second over so many steps."""
        tokens, seconds = np.sum([self.step() for _ in range(steps)], axis=0)
        return float(tokens / seconds)


@pytest.mark.parametrize("variable_width", [False, True])
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 32])
def test_a_drafter_that_is_always_wrong_costs_under_three_percent(
    num_requests: int, confident: bool, variable_width: bool
) -> None:
    economy = Economy(np.zeros(num_requests), variable_width=variable_width, confident=confident)
    economy.run(60)
    assert economy.run(1200) > 0.97 * economy.plain_rate
    assert economy.num_drafted.sum() > 0, "it must be heard of now and then"


def test_a_drafter_that_claims_to_be_right_and_is_wrong_is_shut_out() -> None:
    economy = Economy(np.zeros(4), claims=np.full(4, 0.95))
    economy.run(60)
    economy.num_shut = 0
    assert economy.run(1000) > 0.97 * economy.plain_rate
    assert economy.num_shut > 950


@pytest.mark.parametrize("variable_width", [False, True])
@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16])
def test_a_drafter_that_is_always_right_is_never_shut_out(num_requests: int, variable_width: bool) -> None:
    economy = Economy(np.ones(num_requests), variable_width=variable_width)
    rate = economy.run(200)
    assert economy.num_shut == 0
    assert economy.num_drafted.min() == 200
    assert rate > economy.plain_rate


@pytest.mark.parametrize("acceptance", [0.2, 0.4, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 32])
def test_speculation_never_loses_to_plain_decoding_and_keeps_most_of_its_gain(
    num_requests: int, acceptance: float
) -> None:
    economy = Economy(np.full(num_requests, acceptance))
    economy.run(200)
    rate = economy.run(600)
    assert rate > 0.97 * economy.plain_rate
    best = best_fixed_rate(num_requests, acceptance)
    assert rate > 0.93 * best


def best_fixed_rate(num_requests: int, acceptance: float) -> float:
    """The best of drafting k for everyone, verifying all of them, for k from 0."""
    rates = []
    for k in range(WIDTH + 1):
        tokens = num_requests * (1 + sum(acceptance**j for j in range(1, k + 1)))
        verify_s = LAPTOP.verify_seconds(num_requests * (k + 1), 1, 256)[0]
        rates.append(tokens / (verify_s + LAPTOP.draft_seconds(num_requests, k)))
    return max(rates)


def test_a_drafter_that_recovers_is_used_again() -> None:
    economy = Economy(np.zeros(1), variable_width=False)
    economy.run(2000)
    economy.acceptance = np.ones(1)
    economy.run(400)
    economy.num_shut = 0
    economy.run(100)
    assert economy.num_shut == 0


def test_hopeless_requests_stop_drafting_while_others_go_on() -> None:
    acceptance = np.array([0.9] * 4 + [0.0] * 12)
    # Verifying costs little here and drafting much, each request its own part.
    curve = CostCurve(
        CurvePoints(
            tokens=(1, 128),
            contexts=(256,),
            verify_s=((0.02, 0.025),),
            requests=(1, 16),
            widths=(WIDTH,),
            draft_s=((0.001,), (0.016,)),
        ),
        measured_at=0.0,
    )
    economy = Economy(acceptance, variable_width=False, curve=curve)
    economy.run(300)
    economy.num_drafted[:] = 0
    economy.run(500)
    good, bad = economy.num_drafted[:4], economy.num_drafted[4:]
    assert good.min() > 400
    assert bad.mean() < 60
    assert bad.min() > 0, "each is heard of now and then"


def test_estimates_start_at_certainty_and_learn_from_rounds() -> None:
    estimates = AcceptanceEstimates(2, 3)
    assert estimates.rates(np.array([0, 1])).tolist() == [[1.0] * 3] * 2
    for _ in range(30):
        estimates.observe(
            slots=np.array([0]),
            num_drafted=np.array([3]),
            num_verified=np.array([3]),
            num_accepted=np.array([1]),
            confidence=np.full((1, 3), np.nan),
        )
    first, second, third = estimates.rates(np.array([0]))[0]
    assert first == 1.0
    assert second < 0.05
    assert third == 1.0, "never reached, so nothing was learned"
    assert estimates.rates(np.array([1]))[0][1] < 0.2, "another request starts from what was learned"


def test_trimmed_drafts_count_with_their_confidence() -> None:
    """Otherwise only the positions that looked good would be counted, and drafting would look better than it is."""
    estimates = AcceptanceEstimates(1, 2)
    for _ in range(200):
        estimates.observe(
            slots=np.array([0]),
            num_drafted=np.array([2]),
            num_verified=np.array([0]),
            num_accepted=np.array([0]),
            confidence=np.array([[0.3, 0.9]]),
        )
        estimates.tick()
    first, second = estimates.rates(np.array([0]))[0]
    assert first == pytest.approx(0.3, abs=0.05)
    assert second == pytest.approx(0.9, abs=0.05)


def test_a_request_forgets_with_time_and_leans_on_the_others_again() -> None:
    estimates = AcceptanceEstimates(2, 1)
    wrong = {"num_drafted": np.array([1]), "num_verified": np.array([1]), "confidence": np.full((1, 1), np.nan)}
    for _ in range(20):
        estimates.observe(slots=np.array([0]), num_accepted=np.array([0]), **wrong)
    for _ in range(400):
        estimates.observe(slots=np.array([1]), num_accepted=np.array([1]), **wrong)
        estimates.tick()
    assert estimates.rates(np.array([0]))[0][0] > 0.8


def choose_alone(
    gate: DraftGate,
    step: int,
    survival: list[float],
    verify_ms: list[float],
    draft_ms: float,
    *,
    looks_ahead: bool = False,
) -> Choice:
    width = len(survival)
    draft_seconds = np.full((2, width + 1), draft_ms)
    draft_seconds[0] = draft_seconds[:, 0] = 0.0
    return gate.choose(
        step=step,
        survival=np.array([survival]),
        idle_steps=np.array([step]),
        prices=Prices(
            num_sampling=1, verify_seconds=np.array(verify_ms), draft_seconds=draft_seconds, looks_ahead=looks_ahead
        ),
    )


def test_drafts_that_algorithm1_would_not_verify_are_not_paid_for() -> None:
    """Past a stair the drafts would be worth it, but Algorithm 1 stops before the stair."""
    gate = DraftGate(3, variable_width=False)
    gate.probed(0, success=False)
    stair = choose_alone(gate, 0, [0.9, 0.8, 0.7], [1.0, 2.5, 2.5, 2.5], 0.1)
    assert stair.shut and stair.probe == 0, "the first step is a probe"
    assert choose_alone(gate, 1, [0.9, 0.8, 0.7], [1.0, 2.5, 2.5, 2.5], 0.1).width == 0
    assert choose_alone(gate, 2, [0.9, 0.8, 0.7], [1.0, 1.1, 1.2, 1.3], 0.1).width == 3
    ahead = choose_alone(gate, 3, [0.9, 0.8, 0.7], [1.0, 2.5, 2.5, 2.5], 0.1, looks_ahead=True)
    assert ahead.width == 3, "auto goes over the stair: 3.4 tokens in 2.6 ms against 1 in 1"


def test_probes_move_apart_while_they_fail_and_together_when_one_succeeds() -> None:
    gate = DraftGate(1, variable_width=False)
    probes = []
    for step in range(4000):
        if choose_alone(gate, step, [0.01], [1.0, 1.05], 0.05).probe == 0:
            probes.append(step)
            gate.probed(step, success=len(probes) > 6)
        if len(probes) == 9:
            break
    gaps = np.diff(probes)
    shortest = 0.1 / PROBE_SHARE
    assert gaps[0] >= int(shortest)
    assert list(gaps[:5]) == sorted(gaps[:5])
    assert gaps[4] >= 3 * shortest, "a drafter that stays wrong is asked ever less"
    assert gaps[6] < gaps[4] / 2 and gaps[7] < gaps[4] / 2


def trials(gate: DraftGate, steps: range, margin: float, *, success: bool) -> list[int]:
    """At which steps a gate, to which drafting seems worth so much of plain decoding, tries it."""
    at = []
    for step in steps:
        choice = choose_alone(gate, step, [0.5], [1.0, 1.4], 1.5 / margin - 1.4, looks_ahead=True)
        if choice.trial:
            assert (choice.rows.tolist(), choice.width, choice.probe, choice.shut) == ([0], 1, -1, True)
            at.append(step)
            gate.tried(step, success=success)
    return at


def test_a_gate_that_is_shut_but_not_by_far_tries_now_and_then() -> None:
    gate = DraftGate(1, variable_width=False)
    gate.next_probe = 1 << 30
    gaps = np.diff(trials(gate, range(6000), 0.9, success=False))
    shortest = 0.1 * 1.5 / 0.9 / PROBE_SHARE
    assert list(gaps) == sorted(gaps) and gaps[0] >= int(shortest), "what a trial loses is paid in steps without one"
    assert gaps[-1] <= 4 * shortest + 1
    assert len(trials(gate, range(6000, 6800), 0.9, success=True)) > 40, "one that succeeds is repeated"
    assert trials(gate, range(7000, 13000), 0.8, success=True) == [], "so wrong no curve is"


def test_a_size_that_the_curve_makes_too_dear_is_found_out() -> None:
    """Nobody runs it while the gate is shut, so that without trials nothing could correct it."""
    tokens = (1, 8, 16, 32, 64, 128)
    points = CurvePoints(
        tokens=tokens,
        contexts=(256,),
        verify_s=((0.014, 0.014, 0.015, 0.016, 0.019, 0.040),),
        requests=(1, 32),
        widths=(1, 7),
        draft_s=((0.001, 0.001), (0.002, 0.003)),
    )
    dear = replace(points, verify_s=((0.014, 0.014, 0.015, 0.0255, 0.033, 0.070),))
    economy = Economy(
        np.full(16, 0.6), curve=CostCurve(points, measured_at=0.0), known=RefinedCurve(CostCurve(dear, measured_at=0.0))
    )
    economy.run(20)
    assert economy.num_shut > 10
    economy.run(1480)
    economy.num_shut = 0
    rate = economy.run(300)
    assert economy.num_shut < 30 and rate > 1.1 * economy.plain_rate


@pytest.mark.parametrize("requests", [1, 2, 16])
def test_where_the_curve_is_right_trials_cost_a_fifth_of_a_percent(requests: int) -> None:
    """A lucky token of one or two requests was once taken for a success, and repeated at once."""
    curve = CostCurve(
        CurvePoints(
            tokens=(1, 8, 16, 32, 64, 128),
            contexts=(256,),
            verify_s=((0.010, 0.017, 0.025, 0.042, 0.075, 0.140),),
            requests=(1, 32),
            widths=(1, 7),
            draft_s=((0.002, 0.002), (0.004, 0.005)),
        ),
        measured_at=0.0,
    )
    economy = Economy(np.full(requests, 0.30), curve=curve, known=RefinedCurve(curve))
    economy.run(500)
    plain, tried = economy.plain_rate, economy.num_trials
    rate = economy.run(6000)
    assert economy.num_trials > tried, "without trials there would be nothing to see"
    assert rate > 0.995 * plain


def test_many_requests_are_weighed_in_groups_and_those_that_pay_are_found() -> None:
    rng = np.random.default_rng(2)
    good = rng.permutation(512) < 128
    survival = np.cumprod(np.where(good, 0.9, 0.02)[:, None] * np.ones((1, WIDTH)), axis=1)
    seconds = 0.020 + 0.00002 * np.arange(512 * (WIDTH + 1) + 1)
    gate = DraftGate(WIDTH, variable_width=True)
    gate.probed(0, success=False)
    gate.choose(step=0, survival=survival, idle_steps=np.zeros(512, dtype=np.int64), prices=_flat(seconds))
    choice = gate.choose(step=1, survival=survival, idle_steps=np.zeros(512, dtype=np.int64), prices=_flat(seconds))
    assert 112 <= len(choice.rows) <= 128 + 8
    assert good[choice.rows].mean() > 0.9


def _flat(verify_seconds: np.ndarray) -> Prices:
    draft = np.linspace(0.0, 0.004, 513)[:, None] * np.linspace(0.5, 1.0, WIDTH + 1)
    return Prices(num_sampling=512, verify_seconds=verify_seconds, draft_seconds=draft, looks_ahead=True)
