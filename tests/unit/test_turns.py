"""Timing in turns: one slow spell of the machine does not stand for the work that happened to be timed in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from verifier import turns
from verifier.turns import median_seconds

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert turns.time is time
    return now


def takes(clock: list[float], seconds: float, slow: Callable[[float], bool] = lambda now: False) -> Callable[[], None]:
    def work() -> None:
        clock[0] += seconds * (10.0 if slow(clock[0]) else 1.0)

    return work


def test_a_spell_that_is_longer_than_all_runs_of_one_work_changes_nothing(clock: list[float]) -> None:
    works = [takes(clock, s, lambda now: 0.05 < now < 0.2) for s in (0.001, 0.002, 0.004, 0.008)]
    assert median_seconds(works, CPU) == pytest.approx([0.001, 0.002, 0.004, 0.008])


def test_what_takes_long_has_fewer_turns_and_order_is_kept(clock: list[float]) -> None:
    ran: list[str] = []

    def named(name: str, seconds: float) -> Callable[[], None]:
        work = takes(clock, seconds)
        return lambda: (ran.append(name), work())[1]

    assert median_seconds([named("a", 0.01), named("slow", 1.0)], CPU, turns=5) == pytest.approx([0.01, 1.0])
    assert ran == ["a", "slow"] * 4 + ["a"] * 2
    assert median_seconds([], CPU) == []
