"""Calibration: temperatures per regime and position, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter.calibration import UNCALIBRATED, Calibration, load_calibration, save_calibration
from scheduler.errors import SettingsError
from scheduler.wire import SamplingParams

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def test_without_temperatures_confidence_is_the_plain_sigmoid_and_never_overflows() -> None:
    logits = np.array([[0.0, 2.0, -1000.0, 1000.0]], dtype=np.float32)
    confidence = UNCALIBRATED.apply(logits, [GREEDY])
    np.testing.assert_allclose(confidence, [[0.5, sigmoid(2.0), 0.0, 1.0]], atol=1e-6)
    assert confidence.dtype == np.float32


def test_each_request_gets_its_regime_and_each_position_its_temperature() -> None:
    calibration = Calibration({"greedy": (0.5, 1.0, 4.0), "sampled": (2.0, 1.0, 1.0)})
    logits = np.full((3, 2), 1.5, dtype=np.float32)
    confidence = calibration.apply(logits, [SAMPLED, GREEDY, SAMPLED])
    expected = [[sigmoid(0.75), sigmoid(1.5)], [sigmoid(3.0), sigmoid(1.5)], [sigmoid(0.75), sigmoid(1.5)]]
    np.testing.assert_allclose(confidence, expected, rtol=1e-5)


def test_a_regime_that_was_not_fitted_is_left_alone() -> None:
    logits = np.array([[1.5]], dtype=np.float32)
    np.testing.assert_allclose(Calibration({"greedy": (3.0,)}).apply(logits, [SAMPLED]), [[sigmoid(1.5)]], rtol=1e-5)


def test_the_file_reads_back_what_was_saved(tmp_path: Path) -> None:
    calibration = Calibration({"greedy": (0.5, 1.25), "sampled": (2.0, 1.0)}, checkpoint="abc")
    save_calibration(tmp_path, calibration, facts={"ece_after": 0.01})
    assert load_calibration(tmp_path, num_positions=2, fingerprint="abc") == calibration
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]


def test_no_file_is_no_calibration(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, num_positions=7, fingerprint="abc") is UNCALIBRATED


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ([], "version"),
        ({"version": 2, "regimes": {}}, "version must be 1"),
        ({"version": 1}, "regimes"),
        ({"version": 1, "regimes": {"chat": {"temperatures": [1, 1]}}}, "greedy and sampled"),
        (
            {"version": 1, "regimes": {"greedy": {"temperatures": [1]}}},
            "regimes.greedy.temperatures must be a list of 2",
        ),
        ({"version": 1, "regimes": {"greedy": [1, 1]}}, "regimes.greedy.temperatures"),
        ({"version": 1, "regimes": {"greedy": {"temperatures": [1, 0]}}}, "above 0"),
        ({"version": 1, "regimes": {"greedy": {"temperatures": [1, float("nan")]}}}, "finite"),
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
