"""A disk that is full while something is written: one line that names the file, and nothing half-written is left."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.calibration import Calibration, save_calibration
from drafter.checkpoint import write_checkpoint
from drafter.train.states import save_atomically
from scheduler.errors import Failed, SettingsError
from scheduler.throughput import CostCurve, CurvePoints, save_curve
from services.whole_file import write_whole
from tests.unit.test_target_model import write_tiny_gguf
from verifier.weights import resolve_model

POINTS = CurvePoints((1, 8), (0,), ((0.01, 0.02),), (1,), (1,), ((0.001,),))


@contextmanager
def full_disk(num_bytes: int = 64) -> Iterator[None]:
    """No file may grow beyond that: Python ignores the signal, and writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint_writer(golden: Path) -> Callable[[Path], None]:
    """The golden drafter once more, calibrated: its calibration must outlive a checkpoint that does not get written."""
    config = json.loads((golden / "dspark_vanilla" / "config.json").read_text())
    tensors = load_file(golden / "dspark_vanilla" / "model.safetensors")

    def write(folder: Path) -> None:
        write_checkpoint(folder, config, tensors)
        (folder / "calibration.json").write_text("{}")

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "curve": lambda folder: save_curve(folder / "curve.json", CostCurve(POINTS, 1.0), {"machine": "m"}),
    "calibration": lambda folder: save_calibration(folder, Calibration({}, "c" * 200)),
    "training state": lambda folder: save_atomically({"x": torch.zeros(999)}, folder / "training.safetensors"),
    "benchmark": lambda folder: write_whole(folder / "numbers.json", "x" * 10_000),
}


@pytest.mark.parametrize("before", [True, False], ids=["there before", "not there before"])
@pytest.mark.parametrize("what", [*WRITERS, "checkpoint"])
def test_what_does_not_fit_is_one_error_and_leaves_the_folder_as_it_was(
    tmp_path: Path, golden: Path, what: str, before: bool
) -> None:
    write = checkpoint_writer(golden) if what == "checkpoint" else WRITERS[what]
    if before:
        write(tmp_path)
    found = tree(tmp_path)
    with full_disk(), pytest.raises((SettingsError, Failed, OSError)) as refused:
        write(tmp_path)
    assert tree(tmp_path) == found
    if not isinstance(refused.value, OSError):
        assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value) and "File too large" in str(refused.value)
    write(tmp_path)


def test_weights_that_cannot_be_converted_leave_nothing_and_name_the_setting(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(pytest.importorskip("gguf"), gguf)
    cache = tmp_path / "cache"
    with full_disk(2000), pytest.raises(SettingsError, match=r"cache_dir: .*tiny\.gguf.*set another one") as refused:
        resolve_model(str(gguf), str(cache))
    assert "\n" not in str(refused.value) and not list(cache.iterdir())
    assert (resolve_model(str(gguf), str(cache)) / "config.json").is_file()


def test_a_result_goes_to_a_device_as_it_is() -> None:
    write_whole("/dev/null", "numbers")
    assert not Path("/dev/null").is_file()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"could not write .*nowhere/x\.json: No such file"):
        write_whole(tmp_path / "nowhere" / "x.json", "x")
