"""A gate that has been shut for long is suspended, and what ends that."""

from __future__ import annotations

import pytest

from scheduler.standby import Standby

NEVER = 1 << 40


def shut(standby: Standby, step: int, **changes: object) -> None:
    arguments: dict[str, object] = {
        "margin": 0.9, "next_probe": NEVER, "may_suspend": True, "num_decoding": 16, "wishes": []
    }  # fmt: skip
    standby.shut(step, **(arguments | changes))  # type: ignore[arg-type]


def suspended(**changes: object) -> Standby:
    standby = Standby()
    for step in range(0, 200, 8):
        shut(standby, step, **changes)
    return standby


def test_a_shut_gate_is_asked_again_after_a_while_or_when_a_probe_is_due() -> None:
    standby = Standby()
    shut(standby, 100)
    assert [step for step in range(100, 110) if standby.lasts(step, 16, [])] == list(range(100, 108))
    shut(standby, 100, next_probe=103)
    assert [step for step in range(100, 110) if standby.lasts(step, 16, [])] == [100, 101, 102]


@pytest.mark.parametrize(("num_decoding", "same"), [(16, True), (14, True), (18, True), (13, False), (19, False)])
def test_another_load_is_a_reason_to_ask(num_decoding: int, same: bool) -> None:
    standby = Standby()
    shut(standby, 1)
    assert standby.lasts(2, num_decoding, []) == same


def test_another_wish_is_a_reason_to_ask() -> None:
    standby = Standby()
    shut(standby, 1, wishes=["a"])
    assert standby.lasts(2, 16, ["a"])
    assert not standby.lasts(2, 16, ["b"])


@pytest.mark.parametrize(("num_decoding", "steps"), [(16, 32), (64, 8), (2, 256)])
def test_it_is_suspended_after_as_many_rounds_whatever_the_load(num_decoding: int, steps: int) -> None:
    standby = Standby()
    shut(standby, 0, num_decoding=num_decoding)
    shut(standby, steps - 1, num_decoding=num_decoding)
    assert not standby.suspended
    shut(standby, steps, num_decoding=num_decoding)
    assert standby.suspended


@pytest.mark.parametrize("changes", [{"margin": 0.98}, {"margin": float("nan")}, {"may_suspend": False}])
def test_it_is_not_suspended_where_that_could_be_a_mistake(changes: dict[str, object]) -> None:
    assert suspended().suspended
    assert not suspended(**changes).suspended


def test_an_open_gate_begins_the_count_anew() -> None:
    standby = Standby()
    shut(standby, 0)
    standby.opened()
    shut(standby, 40)
    assert not standby.suspended
    shut(standby, 80)
    assert standby.suspended


def test_steps_of_another_planner_do_not_count_and_what_was_suspended_still_is() -> None:
    standby = Standby()
    shut(standby, 0)
    standby.interrupted()
    shut(standby, 1000)
    assert not standby.suspended, "nobody weighed those thousand steps"
    standby = suspended()
    standby.interrupted()
    assert standby.suspended
    assert not standby.lasts(1000, 16, []), "it is asked at once"


def test_suspended_it_wakes_when_two_forecasts_in_a_row_would_open_the_gate() -> None:
    standby = suspended()
    findings = (True, False, True, True)
    woke = [
        standby.wakes(200 + 8 * i, would_open=would, num_decoding=16, wishes=[]) for i, would in enumerate(findings)
    ]
    assert woke == [False, False, False, True]
    assert not standby.suspended
    shut(standby, 240)
    assert not standby.suspended, "it begins the count anew"


def test_suspended_it_looks_anew_after_a_while_and_is_suspended_again_at_once() -> None:
    standby = suspended(next_probe=100)
    steps = range(200, 2000, 8)
    woke = next(step for step in steps if standby.wakes(step, would_open=False, num_decoding=16, wishes=[]))
    assert 512 < woke < 800
    shut(standby, woke + 12, may_suspend=False)
    assert not standby.suspended, "it is just looking"
    shut(standby, woke + 20)
    assert standby.suspended


def test_it_does_not_look_anew_before_a_probe_is_due() -> None:
    standby = suspended(next_probe=5000)
    assert not standby.wakes(4999, would_open=False, num_decoding=16, wishes=[])
    assert standby.wakes(5000, would_open=False, num_decoding=16, wishes=[])
