"""Stated confidences against what happens: drift is found, corrected and shown, class by class, and right ones are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.drift import TEXT_CLASSES, ConfidenceDrift, class_index

pytestmark = pytest.mark.usefixtures("arithmetic")

WIDTH = 3


def serve(
    drift: ConfidenceDrift, truth: float, stated: float, *, group: int = 0, steps: int = 600, rows: int = 4
) -> None:
    """Rounds in which every draft is accepted with probability `truth`, and the drafter states `stated`."""
    rng = np.random.default_rng(5)
    groups = np.full(rows, group)
    for _ in range(steps):
        said = np.full((rows, WIDTH), stated)
        believed = drift.correct(said, groups)
        accepted = np.cumprod(rng.random((rows, WIDTH)) < truth, axis=1).sum(axis=1)
        drift.observe(
            groups=groups, stated=said, believed=believed, num_verified=np.full(rows, WIDTH), num_accepted=accepted
        )


def believed_now(drift: ConfidenceDrift, stated: float, group: int = 0) -> np.ndarray:
    return drift.correct(np.full((1, WIDTH), stated), np.array([group]))[0]


@pytest.mark.parametrize(("truth", "stated"), [(0.4, 0.8), (0.8, 0.4), (0.05, 0.6), (0.97, 0.5)])
def test_a_wrong_confidence_is_believed_less_and_less(truth: float, stated: float) -> None:
    drift = ConfidenceDrift(WIDTH)
    serve(drift, truth, stated)
    assert believed_now(drift, stated)[0] == pytest.approx(truth, abs=0.08)


def test_a_right_confidence_is_left_alone() -> None:
    drift = ConfidenceDrift(WIDTH)
    serve(drift, 0.7, 0.7)
    np.testing.assert_allclose(believed_now(drift, 0.7), 0.7, atol=0.1)


def test_classes_and_regimes_do_not_teach_each_other() -> None:
    drift = ConfidenceDrift(WIDTH)
    serve(drift, 0.2, 0.8, group=2 * class_index("chat"))
    assert believed_now(drift, 0.8, 2 * class_index("chat"))[0] < 0.35
    assert believed_now(drift, 0.8, 2 * class_index("chat") + 1)[0] == pytest.approx(0.8)
    assert believed_now(drift, 0.8, 2 * class_index("code"))[0] == pytest.approx(0.8)


def test_unknown_class_names_share_the_first_class() -> None:
    assert class_index("poetry") == class_index("") == 0
    assert [class_index(name) for name in TEXT_CLASSES] == list(range(len(TEXT_CLASSES)))


def test_certainty_and_nan_stay_what_they_are() -> None:
    drift = ConfidenceDrift(WIDTH)
    serve(drift, 0.3, 0.9)
    corrected = drift.correct(np.array([[0.0, 1.0, np.nan]]), np.array([0]))[0]
    assert corrected[0] == 0.0 and corrected[1] == 1.0 and np.isnan(corrected[2])


def test_only_drafts_that_were_reached_and_verified_teach() -> None:
    drift = ConfidenceDrift(WIDTH)
    for _ in range(200):
        drift.observe(
            groups=np.array([0]),
            stated=np.array([[0.9, 0.9, np.nan]]),
            believed=np.array([[0.9, 0.9, np.nan]]),
            num_verified=np.array([2]),
            num_accepted=np.array([0]),
        )
    (row,) = drift.report()
    assert row.trials == (200.0, 0.0, 0.0) and row.accepted == (0.0, 0.0, 0.0)
    assert row.stated[0] == pytest.approx(180.0) and row.believed[0] == pytest.approx(180.0)
    assert believed_now(drift, 0.9)[1] == pytest.approx(0.9)


def test_a_correction_of_one_draft_does_not_depend_on_the_others() -> None:
    drift = ConfidenceDrift(WIDTH)
    serve(drift, 0.3, 0.9, steps=50)
    rows = np.array([[0.9, 0.1, 0.2], [0.9, 0.8, 0.7]])
    corrected = drift.correct(rows, np.array([0, 0]))
    assert corrected[0, 0] == corrected[1, 0]
    assert (np.diff(drift.correct(np.linspace(0.01, 0.99, 50)[:, None], np.zeros(50, dtype=np.int64))[:, 0]) > 0).all()
