"""Numbers of benchmark arms: percentiles, the table, and one JSON line at the end."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.generate import Tally


@dataclass(frozen=True, slots=True)
class Arm:
    """One planner on one kind of prompt at one concurrency. Lists have one entry per round of the benchmark, or per
    request. accept_length: tokens per verify round, the target's own one included. budget: drafted tokens verified per
    round."""

    kind: str
    concurrency: int
    planner: str
    tokens_per_s: list[float]
    first_token_s: list[float]
    per_token_s: list[float]
    num_tokens: int
    num_rounds: int
    num_round_tokens: int
    num_verified: int

    @classmethod
    def of_run(cls, kind: str, concurrency: int, planner: str, tallies: Sequence[Tally], seconds: float) -> Arm:
        num_tokens = sum(tally.num_tokens for tally in tallies)
        return cls(
            kind=kind,
            concurrency=concurrency,
            planner=planner,
            tokens_per_s=[num_tokens / seconds],
            first_token_s=[tally.first_token_s for tally in tallies],
            per_token_s=[
                (tally.last_token_s - tally.first_token_s) / (tally.num_tokens - 1)
                for tally in tallies
                if tally.num_tokens > 1
            ],
            num_tokens=num_tokens,
            num_rounds=sum(tally.num_rounds for tally in tallies),
            num_round_tokens=sum(tally.num_round_tokens for tally in tallies),
            num_verified=sum(tally.num_verified for tally in tallies),
        )

    @classmethod
    def merged(cls, runs: Sequence[Arm]) -> Arm:
        first = runs[0]
        return cls(
            kind=first.kind,
            concurrency=first.concurrency,
            planner=first.planner,
            tokens_per_s=[speed for run in runs for speed in run.tokens_per_s],
            first_token_s=[s for run in runs for s in run.first_token_s],
            per_token_s=[s for run in runs for s in run.per_token_s],
            num_tokens=sum(run.num_tokens for run in runs),
            num_rounds=sum(run.num_rounds for run in runs),
            num_round_tokens=sum(run.num_round_tokens for run in runs),
            num_verified=sum(run.num_verified for run in runs),
        )

    @property
    def accept_length(self) -> float:
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def budget(self) -> float:
        return self.num_verified / self.num_rounds if self.num_rounds else 0.0

    def numbers(self, baseline: Arm | None) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "concurrency": self.concurrency,
            "planner": self.planner,
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 2),
            "tokens_per_s_runs": [round(speed, 2) for speed in self.tokens_per_s],
            "speedup": round(speedup(self, baseline), 3) if baseline is not None else None,
            "ttft_ms_p50": round(1000 * percentile(self.first_token_s, 50), 1),
            "ttft_ms_p99": round(1000 * percentile(self.first_token_s, 99), 1),
            "tpot_ms_p50": round(1000 * percentile(self.per_token_s, 50), 2),
            "tpot_ms_p99": round(1000 * percentile(self.per_token_s, 99), 2),
            "accept_length": round(self.accept_length, 3),
            "verify_budget": round(self.budget, 3),
            "tokens": self.num_tokens,
        }


def speedup(arm: Arm, baseline: Arm) -> float:
    """Median over the rounds of arm over baseline in the same round: a slow minute of the machine meets both."""
    pairs = zip(arm.tokens_per_s, baseline.tokens_per_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


_COLUMNS = (
    ("kind", "kind"),
    ("concurrency", "conc"),
    ("planner", "planner"),
    ("tokens_per_s", "tok/s"),
    ("speedup", "speedup"),
    ("ttft_ms_p50", "ttft50"),
    ("ttft_ms_p99", "ttft99"),
    ("tpot_ms_p50", "tpot50"),
    ("tpot_ms_p99", "tpot99"),
    ("accept_length", "accept"),
    ("verify_budget", "budget"),
)


def print_report(arms: Sequence[Arm], planners: Sequence[str]) -> None:
    rows = report(arms, planners)
    print("".join(f"{title:>12}" for _, title in _COLUMNS))
    for row in rows:
        print("".join(f"{'' if row[key] is None else row[key]!s:>12}" for key, _ in _COLUMNS))
    print("times in ms; accept: tokens per verify round, the target's own included; budget: drafts verified per round")
    print(f"speedup: against {planners[0]}, median of the rounds run side by side")
    print(json.dumps({"bench": rows}))


def report(arms: Sequence[Arm], planners: Sequence[str]) -> list[dict[str, Any]]:
    baselines = {(arm.kind, arm.concurrency): arm for arm in arms if arm.planner == planners[0]}
    return [arm.numbers(baselines.get((arm.kind, arm.concurrency)) if len(planners) > 1 else None) for arm in arms]
