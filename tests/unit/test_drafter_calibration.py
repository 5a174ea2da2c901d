"""Calibration: scalings per regime and position, how they are applied, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.calibration import (
    UNCALIBRATED,
    Calibration,
    Scaling,
    load_calibration,
    logits_of,
    save_calibration,
    sigmoid,
)
from scheduler.errors import SettingsError
from scheduler.wire import SamplingParams

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=5)


def sigma(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def calibration(**regimes: Scaling) -> Calibration:
    return Calibration(regimes)


def test_without_a_fit_confidence_is_the_plain_sigmoid_and_never_overflows() -> None:
    logits = np.array([[0.0, 2.0, -1000.0, 1000.0]], dtype=np.float32)
    confidence = UNCALIBRATED.apply(logits, [GREEDY])
    np.testing.assert_allclose(confidence, [[0.5, sigma(2.0), 0.0, 1.0]], atol=1e-6)
    assert confidence.dtype == np.float32


def test_each_request_gets_its_regime_and_each_position_its_temperature_and_bias() -> None:
    fitted = calibration(
        greedy=Scaling((0.5, 1.0, 4.0), (0.0, 1.0, 0.0)), sampled=Scaling((2.0, 1.0, 1.0), (-1.0, 0.0, 0.0))
    )
    logits = np.full((3, 2), 1.5, dtype=np.float32)
    confidence = fitted.apply(logits, [SAMPLED, GREEDY, SAMPLED])
    sampled = [sigma(0.75 - 1.0), sigma(1.5)]
    np.testing.assert_allclose(confidence, [sampled, [sigma(3.0), sigma(2.5)], sampled], rtol=1e-5)


def test_a_regime_that_was_not_fitted_is_left_alone_and_a_seed_falls_back_on_sampling() -> None:
    logits = np.array([[1.5]], dtype=np.float32)
    only_greedy = calibration(greedy=Scaling.of_temperatures(3.0))
    np.testing.assert_allclose(only_greedy.apply(logits, [SAMPLED]), [[sigma(1.5)]], rtol=1e-5)
    sampled = calibration(sampled=Scaling.of_temperatures(3.0))
    np.testing.assert_allclose(sampled.apply(logits, [SEEDED]), [[sigma(0.5)]], rtol=1e-5)
    both = calibration(sampled=Scaling.of_temperatures(3.0), seeded=Scaling.of_temperatures(0.5))
    np.testing.assert_allclose(both.apply(logits, [SEEDED]), [[sigma(3.0)]], rtol=1e-5)


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 0.0), (0.25, 0.25), (0.7, 0.7), (1.0, 1.0), (1.8, 1.0)])
def test_between_greedy_and_temperature_one_the_two_fits_are_mixed(temperature: float, share: float) -> None:
    fitted = calibration(greedy=Scaling((1.0,), (-1.0,)), sampled=Scaling((2.0,), (0.5,)))
    confidence = fitted.apply(np.array([[3.0]], dtype=np.float32), [SamplingParams(temperature=temperature)])
    np.testing.assert_allclose(confidence, [[sigma((1 - share) * 2.0 + share * 2.0)]], rtol=1e-5)
    confidence = fitted.apply(np.array([[-1.0]], dtype=np.float32), [SamplingParams(temperature=temperature)])
    np.testing.assert_allclose(confidence, [[sigma((1 - share) * -2.0)]], rtol=1e-5)


def test_a_calibrated_confidence_depends_on_its_own_logit_alone_and_survival_never_grows() -> None:
    random = np.random.default_rng(0)
    scaling = Scaling(tuple(random.uniform(0.5, 3.0, 7)), tuple(random.normal(size=7)))
    fitted = calibration(greedy=scaling, sampled=scaling, seeded=scaling)
    logits = random.normal(0.0, 1.0, (50, 7)).astype(np.float32)
    params = [SamplingParams(temperature=float(t)) for t in random.uniform(0, 2, 50)]
    confidence = fitted.apply(logits, params)
    for k in range(7):
        changed = logits.copy()
        changed[:, k] += 1.0
        others = [j for j in range(7) if j != k]
        after = fitted.apply(changed, params)
        np.testing.assert_array_equal(after[:, others], confidence[:, others])
        assert (after[:, k] > confidence[:, k]).all()
    assert (np.diff(np.cumprod(confidence, axis=1), axis=1) <= 0).all()


def test_a_narrower_draft_uses_the_first_positions() -> None:
    fitted = calibration(greedy=Scaling((0.5, 2.0), (0.1, 0.2)))
    logits = np.array([[1.0, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(fitted.apply(logits[:, :1], [GREEDY]), fitted.apply(logits, [GREEDY])[:, :1])


def test_logits_come_back_from_uncalibrated_confidences() -> None:
    logits = np.linspace(-15.0, 9.0, 40, dtype=np.float32)
    np.testing.assert_allclose(logits_of(sigmoid(logits)), logits, atol=2e-3)
    assert np.isfinite(logits_of(np.array([0.0, 1.0], dtype=np.float32))).all()


def test_the_file_reads_back_what_was_saved(tmp_path: Path) -> None:
    fitted = Calibration(
        {"greedy": Scaling((0.5, 1.25), (0.0, -0.5)), "seeded": Scaling((2.0, 1.0), (0.1, 0.0))}, "abc"
    )
    save_calibration(tmp_path, fitted, facts={"ece_after": 0.01})
    assert load_calibration(tmp_path, num_positions=2, fingerprint="abc") == fitted
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


def test_a_file_without_biases_holds_temperatures_alone(tmp_path: Path) -> None:
    content = {"version": 1, "checkpoint": "abc", "regimes": {"greedy": {"temperatures": [1, 2.5]}}}
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    read = load_calibration(tmp_path, num_positions=2, fingerprint="abc")
    assert read == Calibration({"greedy": Scaling((1.0, 2.5), (0.0, 0.0))}, "abc")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").mkdir()
    with pytest.raises(SettingsError, match=r"could not write .*calibration\.json"):
        save_calibration(tmp_path, Calibration({"greedy": Scaling.of_temperatures(1.0)}))
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


def test_no_file_is_no_calibration(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, num_positions=7, fingerprint="abc") is UNCALIBRATED


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for damage in (b"\xff\xfe{", b"[" * 100_000):
        path.write_bytes(damage)
        with pytest.raises(SettingsError, match=r"calibration\.json is not valid JSON: .*calibrate again"):
            load_calibration(tmp_path, num_positions=7, fingerprint="abc")
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match=r"calibration\.json cannot be read: .*calibrate again"):
        load_calibration(tmp_path, num_positions=7, fingerprint="abc")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ([], "version"),
        ({"version": 2, "regimes": {}}, "version must be 1"),
        ({"version": 1}, "regimes"),
        ({"version": 1, "regimes": {"chat": {"temperatures": [1, 1]}}}, "greedy, sampled, seeded"),
        (
            {"version": 1, "regimes": {"greedy": {"temperatures": [1]}}},
            "regimes.greedy.temperatures must be a list of 2",
        ),
        ({"version": 1, "regimes": {"greedy": [1, 1]}}, "regimes.greedy.temperatures"),
        ({"version": 1, "regimes": {"greedy": {"temperatures": [1, 0]}}}, "above 0"),
        ({"version": 1, "regimes": {"greedy": {"temperatures": [1, float("nan")]}}}, "finite"),
        (
            {"version": 1, "regimes": {"greedy": {"temperatures": [1, 1], "biases": [0]}}},
            "regimes.greedy.biases must be a list of 2",
        ),
        ({"version": 1, "regimes": {"greedy": {"temperatures": [1, 1], "biases": [0, None]}}}, "finite"),
        ({"version": 1, "checkpoint": "other", "regimes": {}}, "checkpoint other is not these weights (abc)"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_field(content: Any, says: str, tmp_path: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_calibration(tmp_path, num_positions=2, fingerprint="abc")
    assert says in str(caught.value)
    assert "calibration.json" in str(caught.value)
