"""Numbers of benchmark arms: percentiles, ratios of rounds that ran side by side, goodput, the table, the JSON document."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.simulate_report import is_fixed
from services.bench.load import Answers
from services.bench.pictures import Point
from services.bench.steps import Step, steady_speed
from services.generate import Tally


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer must keep to be good, seconds: to the first token, and per token after it."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2

    def kept_by(self, tally: Tally) -> bool:
        return tally.first_token_s <= self.ttft_s and (per_token_s(tally) or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Place:
    """Where arms are compared. Either `concurrency` clients or `rate` arrivals per second."""

    kind: str
    temperature: float
    concurrency: int = 0
    rate: float = 0.0

    @property
    def load(self) -> str:
        return f"{self.concurrency}" if self.concurrency else f"{self.rate:g}/s"


@dataclass(slots=True)
class Arm:
    """One planner at one place. Lists have one entry per round of the benchmark, or per answer. accept_length: tokens per verify
    round, the target's own one included. budget: tokens verified per round, likewise. num_good: answers within the limits."""

    place: Place
    planner: str
    tokens_per_s: list[float] = field(default_factory=list)
    good_per_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    num_asked: int = 0
    num_refused: int = 0
    num_good: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    steps: list[Step] = field(default_factory=list)

    def add(self, answers: Answers, limits: Limits, steps: Sequence[Step] = ()) -> None:
        """One round more. steps: of its window, where they are known."""
        self.steps += steps
        counted = answers.counted
        num_good = sum(limits.kept_by(tally) for tally in counted)
        self.tokens_per_s.append(answers.num_tokens / answers.seconds)
        self.good_per_s.append(num_good / answers.seconds)
        self.first_token_s += [tally.first_token_s for tally in counted]
        self.per_token_s += [pace for tally in counted if (pace := per_token_s(tally)) is not None]
        self.num_asked += len(counted) + answers.num_refused
        self.num_refused += answers.num_refused
        self.num_good += num_good
        self.num_tokens += sum(tally.num_tokens for tally in counted)
        self.num_rounds += sum(tally.num_rounds for tally in counted)
        self.num_round_tokens += sum(tally.num_round_tokens for tally in counted)
        self.num_verified += sum(tally.num_verified for tally in counted)
        self.num_accepted += sum(tally.num_accepted for tally in counted)

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def user_speed(self) -> float:
        pace_s = percentile(self.per_token_s, 50)
        return 1.0 / pace_s if pace_s else 0.0

    @property
    def accept_length(self) -> float:
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def budget(self) -> float:
        return 1.0 + self.num_verified / self.num_rounds if self.num_rounds else 1.0

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_asked if self.num_asked else 0.0


def per_token_s(tally: Tally) -> float | None:
    """Over all tokens after the first; None for answers of one token."""
    return (tally.last_token_s - tally.first_token_s) / (tally.num_tokens - 1) if tally.num_tokens > 1 else None


def steady_over_best_fixed(arms: Mapping[str, Arm]) -> dict[str, float]:
    """By planner, steady speed over the greatest of `off` and `fixed:k`; empty where there is none or steps are not known."""
    speeds = {planner: steady_speed(arm.steps) for planner, arm in arms.items()}
    best = max((speed for planner, speed in speeds.items() if is_fixed(planner)), default=0.0)
    return {planner: speed / best for planner, speed in speeds.items()} if best and len(arms) > 1 else {}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median, least and greatest over the rounds of ours over theirs in the same round: a slow minute meets both."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, ours: Arm, theirs: Arm) -> Ratio:
        return cls._of(a / b for a, b in zip(ours.tokens_per_s, theirs.tokens_per_s, strict=True) if b)

    @classmethod
    def over_best_fixed(cls, ours: Arm, arms: Mapping[str, Arm]) -> Ratio | None:
        """In every round against the arm of `off` and `fixed:k` that was the fastest in the other rounds (medians): what is
        chosen for its speed in a round is chosen for that round's luck too, and of equal arms none would reach the best. None
        where there is no such arm."""
        fixed = [arm.tokens_per_s for arm in arms.values() if is_fixed(arm.planner)]
        if not fixed:
            return None
        ratios = []
        for number, speed in enumerate(ours.tokens_per_s):
            best = max(fixed, key=lambda speeds: statistics.median(_but(speeds, number)))
            if best[number]:
                ratios.append(speed / best[number])
        return cls._of(ratios)

    @classmethod
    def _of(cls, ratios: Iterable[float]) -> Ratio:
        known = list(ratios)
        return cls(statistics.median(known), min(known), max(known)) if known else cls(0.0, 0.0, 0.0)

    def rounded(self) -> list[float]:
        return [round(self.median, 4), round(self.least, 4), round(self.most, 4)]


def _but(speeds: Sequence[float], number: int) -> Sequence[float]:
    """All rounds but one; a round alone is its own judge."""
    return [*speeds[:number], *speeds[number + 1 :]] or speeds


def best_fixed(arms: Mapping[str, Arm]) -> Arm | None:
    """Of `off` and `fixed:k` the one with the greatest median."""
    return max((arm for planner, arm in arms.items() if is_fixed(planner)), key=lambda arm: arm.speed, default=None)


Results = Mapping[Place, Mapping[str, Arm]]


def rows(results: Results) -> list[dict[str, Any]]:
    """One per place and planner, in the order they were run. Ratios are [median, least, greatest] over the rounds."""
    listed = []
    for arms in results.values():
        best, steady = best_fixed(arms), steady_over_best_fixed(arms)
        for arm in arms.values():
            row = _numbers(arm)
            row["over_off"] = Ratio.of(arm, arms["off"]).rounded() if "off" in arms and len(arms) > 1 else None
            over_best = Ratio.over_best_fixed(arm, arms) if len(arms) > 1 else None
            row["over_best_fixed"] = over_best.rounded() if over_best is not None else None
            row["best_fixed"] = best.planner if best is not None else None
            row["steady_over_best_fixed"] = round(steady[arm.planner], 4) if steady else None
            listed.append(row)
    return listed


def _numbers(arm: Arm) -> dict[str, Any]:
    return {
        "kind": arm.place.kind,
        "temperature": arm.place.temperature,
        "concurrency": arm.place.concurrency or None,
        "rate": arm.place.rate or None,
        "planner": arm.planner,
        "tokens_per_s": round(arm.speed, 2),
        "tokens_per_s_runs": [round(speed, 2) for speed in arm.tokens_per_s],
        "steady_tokens_per_s": round(steady_speed(arm.steps), 2) or None,
        "user_tokens_per_s": round(arm.user_speed, 2),
        "ttft_ms_p50": round(1000 * percentile(arm.first_token_s, 50), 1),
        "ttft_ms_p99": round(1000 * percentile(arm.first_token_s, 99), 1),
        "tpot_ms_p50": round(1000 * percentile(arm.per_token_s, 50), 2),
        "tpot_ms_p99": round(1000 * percentile(arm.per_token_s, 99), 2),
        "good_per_s": round(statistics.median(arm.good_per_s), 3),
        "good_share": round(arm.good_share, 4),
        "accept_length": round(arm.accept_length, 3),
        "verify_budget": round(arm.budget, 3),
        "tokens": arm.num_tokens,
        "verified": arm.num_verified,
        "accepted": arm.num_accepted,
        "answers": arm.num_asked - arm.num_refused,
        "refused": arm.num_refused,
    }


def sustained(results: Results, share: float = 0.9) -> list[dict[str, Any]]:
    """By kind, temperature and planner, the greatest arrival rate at which at least `share` of the answers are good."""
    rates: dict[tuple[str, float, str], float] = {}
    for place, arms in results.items():
        if place.rate:
            for planner, arm in arms.items():
                key = (place.kind, place.temperature, planner)
                rates[key] = max(rates.get(key, 0.0), place.rate if arm.good_share >= share else 0.0)
    return [
        {"kind": kind, "temperature": temperature, "planner": planner, "rate": rate}
        for (kind, temperature, planner), rate in rates.items()
    ]


def points(results: Results) -> list[Point]:
    """For the pictures: a panel per kind, temperature and kind of load."""
    return [
        Point(
            panel=f"{place.kind}, T={place.temperature:g}{', open loop' if place.rate else ''}",
            planner=planner,
            load=place.rate or place.concurrency,
            tokens_per_s=arm.speed,
            user_tokens_per_s=arm.user_speed,
            budget=arm.budget,
            ratio=ratio.median if (ratio := Ratio.over_best_fixed(arm, arms)) is not None else None,
        )
        for place, arms in results.items()
        for planner, arm in arms.items()
    ]


_COLUMNS = (
    ("tokens_per_s", "tok/s"),
    ("over_off", "/off"),
    ("over_best_fixed", "/best"),
    ("steady_tokens_per_s", "steady"),
    ("steady_over_best_fixed", "/best"),
    ("user_tokens_per_s", "user/s"),
    ("ttft_ms_p50", "ttft50"),
    ("ttft_ms_p99", "ttft99"),
    ("tpot_ms_p50", "tpot50"),
    ("tpot_ms_p99", "tpot99"),
    ("good_share", "good"),
    ("accept_length", "accept"),
    ("verify_budget", "budget"),
)
LEGEND = (
    "times in ms; /off, /best: against `off` and against what of off and fixed:k was best in the other rounds, medians of the\n"
    "rounds run side by side; steady: tok/s if every step took the median of its kind (in process only), and that over the\n"
    "greatest of off and fixed:k;\n"
    "good: share of answers within the limits; accept: tokens per verify round, the target's own included; budget: tokens\n"
    "verified per round, likewise"
)


def table(results: Results) -> list[str]:
    lines = [f"{'kind':<10}{'T':>4}{'load':>8}  {'planner':<15}" + "".join(f"{title:>9}" for _, title in _COLUMNS)]
    for row in rows(results):
        load = row["concurrency"] or f"{row['rate']:g}/s"
        cells = "".join(f"{_cell(row[key])!s:>9}" for key, _ in _COLUMNS)
        lines.append(f"{row['kind']:<10}{row['temperature']:>4g}{load!s:>8}  {row['planner']:<15}{cells}")
    return lines


def _cell(value: object) -> object:
    return "" if value is None else f"{value[0]:.3f}" if isinstance(value, list) else value
