"""The cost curve: monotone, interpolated, extrapolated, and never trusted on another machine."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ports import ROWS_PER_REQUEST
from scheduler.throughput import (
    CostCurve,
    CurvePoints,
    CurveRejected,
    check_points,
    isotonic,
    load_curve,
    measure_curve,
    save_curve,
)
from tests.unit.scheduler_toys import ToyDrafter, ToyVerifier

pytestmark = pytest.mark.usefixtures("arithmetic")

POINTS = CurvePoints(
    tokens=(1, 8, 16, 64),
    contexts=(100, 300),
    verify_s=((0.010, 0.011, 0.014, 0.040), (0.012, 0.013, 0.018, 0.060)),
    requests=(1, 4, 16),
    widths=(2, 4),
    draft_s=((0.002, 0.003), (0.003, 0.005), (0.006, 0.014)),
)
KEY = {"machine": "m", "target": "t"}


@pytest.fixture
def curve() -> CostCurve:
    return CostCurve(POINTS, measured_at=123.0)


def test_measured_points_are_met_and_lines_run_between_them(curve: CostCurve) -> None:
    assert curve.verify_seconds(1, 1, 100)[0] == pytest.approx(0.010)
    assert curve.verify_seconds(12, 1, 100)[0] == pytest.approx(0.0125)
    assert curve.verify_seconds(64, 1, 300)[0] == pytest.approx(0.060)
    assert curve.verify_seconds(8, 1, 200)[0] == pytest.approx(0.012)


def test_past_the_last_size_costs_go_on_in_a_line(curve: CostCurve) -> None:
    seconds = curve.verify_seconds(60, 11, 100)
    assert len(seconds) == 11
    assert np.all(np.diff(seconds) > 0)
    slope = (0.040 - 0.014) / (64 - 16)
    assert seconds[-1] == pytest.approx(0.040 + 6 * slope)
    assert curve.verify_seconds(1000, 2, 100)[1] - curve.verify_seconds(1000, 2, 100)[0] == pytest.approx(slope)


def test_past_the_last_context_costs_go_on_and_before_the_first_they_stay(curve: CostCurve) -> None:
    assert curve.verify_seconds(8, 1, 500)[0] == pytest.approx(0.015)
    assert curve.verify_seconds(8, 1, 1)[0] == pytest.approx(0.011)


def test_many_requests_read_more_than_the_few_that_were_measured_and_drafts_read_nothing_more() -> None:
    curve = CostCurve(replace(POINTS, kv_token_s=1e-6), measured_at=0.0)
    as_measured = curve.verify_seconds(16, 1, 200)[0]
    assert curve.verify_seconds(16, 1, 200, 2 * 200)[0] == pytest.approx(as_measured), "eight rows a request"
    assert curve.verify_seconds(16, 1, 200, 16 * 200)[0] == pytest.approx(as_measured + 14 * 200e-6)
    drafting = curve.verify_seconds(16, 33, 200, 16 * 200)
    plain = curve.verify_seconds(16, 33, 200)
    assert drafting[32] - drafting[0] == pytest.approx(plain[32] - plain[0] - 4 * 200e-6)
    assert (np.diff(drafting) >= 0).all()
    assert curve.verify_seconds(64, 1, 300, 10.0)[0] == pytest.approx(0.060 - 1e-6 * (8 * 300 - 10)), "one long prompt"


@pytest.mark.parametrize("kv_token_s", [0.0, 1e-6, 1e-3])
def test_whatever_is_read_a_step_costs_something_and_more_tokens_never_less(kv_token_s: float) -> None:
    curve = CostCurve(replace(POINTS, kv_token_s=kv_token_s), measured_at=0.0)
    for kv_tokens in (0.0, 100.0, 1e6):
        seconds = curve.verify_seconds(1, 300, 250, kv_tokens)
        assert seconds[0] >= 0.010 and (np.diff(seconds) >= 0).all()


def test_draft_seconds_between_and_beyond_the_sizes(curve: CostCurve) -> None:
    assert curve.draft_seconds(1, 2) == pytest.approx(0.002)
    assert curve.draft_seconds(4, 3) == pytest.approx(0.004)
    assert curve.draft_seconds(2, 4) == pytest.approx(0.003 + 0.002 / 3)
    assert curve.draft_seconds(3, 1) == curve.draft_seconds(3, 2), "narrower than measured is not cheaper"
    assert curve.draft_seconds(0, 4) == curve.draft_seconds(4, 0) == 0.0
    assert curve.draft_seconds(32, 4) == pytest.approx(0.014 + 16 * 0.014 / 16)
    assert curve.draft_seconds(4, 6) == curve.draft_seconds(4, 4)


def test_without_a_drafter_drafts_cost_nothing() -> None:
    curve = CostCurve(CurvePoints((1, 2), (10,), ((0.1, 0.2),)), measured_at=0.0)
    assert curve.draft_seconds(8, 5) == 0.0


def test_noise_does_not_make_a_token_cheaper_than_free() -> None:
    noisy = replace(POINTS, verify_s=((0.010, 0.030, 0.014, 0.040), (0.009, 0.013, 0.018, 0.060)))
    curve = CostCurve(noisy, measured_at=0.0)
    for context in (50, 100, 200, 300, 400):
        assert np.all(np.diff(curve.verify_seconds(1, 100, context)) >= 0)
    assert np.all(curve.verify_seconds(1, 64, 300) >= curve.verify_seconds(1, 64, 100))


def test_an_outlier_does_not_flatten_everything_above_it() -> None:
    """A running maximum would: one slow sample at 2 tokens would make tokens 3 to 7 look free."""
    values = np.array([10.0, 30.0, 12.0, 13.0, 14.0, 15.0, 16.0, 30.0])
    smooth = isotonic(values)
    assert np.all(np.diff(smooth) >= 0)
    assert smooth[1] < 20


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_isotonic_is_ascending_keeps_the_mean_and_leaves_ascending_values_alone(values: list[float]) -> None:
    smooth = isotonic(np.array(values))
    assert np.all(np.diff(smooth) >= -1e-12)
    assert smooth.mean() == pytest.approx(np.mean(values))
    assert isotonic(np.sort(values)) == pytest.approx(np.sort(values))


def test_a_saved_curve_comes_back(curve: CostCurve, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curve.json"
    save_curve(path, curve, KEY)
    loaded = load_curve(path, KEY, width=4)
    assert loaded.points == curve.points
    assert loaded.measured_at == 123.0
    assert loaded.from_file and not curve.from_file
    assert [p.name for p in path.parent.iterdir()] == ["curve.json"], "no scratch file is left"


@pytest.mark.parametrize(
    ("key", "width", "reason"),
    [
        ({**KEY, "machine": "other"}, 4, "machine 'm', and this is 'other'"),
        ({**KEY, "threads": "2"}, 4, "threads None, and this is '2'"),
        ({"machine": "m"}, 4, "target 't', and this is None"),
        (KEY, 7, "up to width 4 and the drafter drafts 7"),
    ],
)
def test_a_curve_of_something_else_is_rejected_and_says_what_differs(
    curve: CostCurve, tmp_path: Path, key: dict[str, str], width: int, reason: str
) -> None:
    save_curve(tmp_path / "c.json", curve, KEY)
    with pytest.raises(CurveRejected, match=reason):
        load_curve(tmp_path / "c.json", key, width=width)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(version=99),
        lambda d: d.pop("points"),
        lambda d: d["points"].update(tokens=[1, 1, 2, 3]),
        lambda d: d["points"].update(tokens=[]),
        lambda d: d["points"]["verify_s"].pop(),
        lambda d: d["points"]["verify_s"][0].__setitem__(1, -0.5),
        lambda d: d["points"]["verify_s"][0].__setitem__(1, float("nan")),
        lambda d: d["points"].update(draft_s=[[0.1, 0.2]]),
        lambda d: d["points"].update(verify_s="much"),
        lambda d: d.update(key=3),
        lambda d: d.update(measured_at=None),
        lambda d: d.update(measured_at=float("nan")),
        lambda d: d.update(measured_at=float("inf")),
        lambda d: d["points"]["tokens"].__setitem__(-1, 10**15),
        lambda d: d["points"]["tokens"].__setitem__(-1, float("inf")),
        lambda d: d["points"]["widths"].__setitem__(-1, 10**12),
    ],
)
def test_a_damaged_file_is_rejected_not_raised_through(curve: CostCurve, tmp_path: Path, damage: object) -> None:
    path = tmp_path / "c.json"
    save_curve(path, curve, KEY)
    document = json.loads(path.read_text())
    damage(document)  # type: ignore[operator]
    path.write_text(json.dumps(document))
    with pytest.raises(CurveRejected):
        load_curve(path, KEY, width=4)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CurveRejected):
        load_curve(tmp_path / "c.json", KEY, width=4)
    with pytest.raises(CurveRejected, match="no curve has been saved"):
        load_curve(tmp_path / "missing.json", KEY, width=4)


async def test_measuring_goes_through_the_ports_and_gives_a_different_cost_per_size() -> None:
    verifier = ToyVerifier(max_model_len=2048)
    drafter = ToyDrafter(verifier, width=5)
    curve = await measure_curve(
        verifier,
        drafter,
        verifier_info=verifier.info(),
        drafter_info=drafter.info(),
        max_live=6,
        max_step_tokens=100,
    )
    check_points(curve.points, width=5)
    assert curve.points.contexts == (256, 1024)
    assert curve.points.tokens[-1] == 100
    assert curve.points.requests == (1, 2, 4, 6)
    assert curve.points.widths[-1] == 5
    assert curve.verify_seconds(50, 1, 256)[0] == pytest.approx(0.01 + 0.05 + 1e-6 * 256)
    assert curve.verify_seconds(50, 1, 1024)[0] == pytest.approx(0.01 + 0.05 + 1e-6 * 1024)
    assert len(set(curve.verify_seconds(1, 100, 256).round(9))) == 100
    assert curve.draft_seconds(2, 3) == pytest.approx(0.002 + 0.0006)


@pytest.mark.parametrize(("token_s", "largest"), [(1e-5, 1024), (1e-3, 256)])
async def test_only_a_fast_device_is_measured_far_out(token_s: float, largest: int) -> None:
    class Device(ToyVerifier):
        async def measure(
            self, num_tokens: Sequence[int], context_lens: Sequence[int], rows: int = 8
        ) -> list[list[float]]:
            return [[0.01 + token_s * n for n in num_tokens] for _ in context_lens]

    verifier = Device(max_model_len=2048)
    curve = await measure_curve(
        verifier, None, verifier_info=verifier.info(), drafter_info=None, max_live=64, max_step_tokens=1200
    )
    assert curve.points.tokens[-1] == largest
    assert curve.verify_seconds(largest, 1, 256)[0] == pytest.approx(0.01 + token_s * largest)


async def test_what_one_more_request_reads_is_measured() -> None:
    class Reads(ToyVerifier):
        async def measure(
            self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
        ) -> list[list[float]]:
            return [
                [0.01 + 0.001 * n + 2e-6 * context * -(-n // rows_per_request) for n in num_tokens]
                for context in context_lens
            ]

    verifier = Reads(max_model_len=2048)
    for max_live, wanted in ((1, 0.0), (5, 2e-6), (64, 2e-6)):
        curve = await measure_curve(
            verifier, None, verifier_info=verifier.info(), drafter_info=None, max_live=max_live, max_step_tokens=300
        )
        assert curve.points.kv_token_s == pytest.approx(wanted)


@pytest.mark.parametrize("broken", [-1e-6, math.nan, math.inf])
def test_a_curve_whose_reading_takes_no_possible_time_is_refused(broken: float) -> None:
    with pytest.raises(CurveRejected, match="kv_token_s"):
        check_points(replace(POINTS, kv_token_s=broken), width=4)


async def test_a_model_with_a_short_context_is_measured_within_it() -> None:
    verifier = ToyVerifier(max_model_len=64)
    curve = await measure_curve(
        verifier, None, verifier_info=verifier.info(), drafter_info=None, max_live=1, max_step_tokens=9
    )
    assert curve.points.contexts == (32,)
    assert curve.points.tokens == (1, 2, 4, 6, 8, 9)


def test_a_lookup_takes_microseconds(curve: CostCurve) -> None:
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        curve.verify_seconds(40, 225, 250.0)
        times.append(time.perf_counter() - begin)
    assert min(times) < 100e-6
