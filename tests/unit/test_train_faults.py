"""What goes wrong in training ends in one line and leaves the last good state."""

from __future__ import annotations

import math
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.train.loop import Training, read_state
from drafter.train.recipe import RunConfig, export, start_training
from scheduler.errors import SettingsError
from services.cli import main
from tests.unit.test_train_parallel import config

__all__ = ["config"]


def state_of(training: Training) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in training.network.named_parameters()}


def test_a_gradient_that_is_no_number_changes_nothing(config: RunConfig) -> None:
    training = start_training(config)
    training.update(training.next_batches())
    training.save()
    before = state_of(training)
    training.network.norm.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(SettingsError, match="gradient is nan at step 1; lower the learning rate and resume"):
        list(training.train())
    after = state_of(training)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    saved, counters = read_state(config.run / "training.safetensors")
    assert counters["step"] == 1
    assert all(torch.equal(saved[f"parameter.{name}"], tensor) for name, tensor in before.items())


def test_a_full_disk_keeps_the_last_saved_state(config: RunConfig) -> None:
    training = start_training(config)
    training.save()
    good = (config.run / "training.safetensors").read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SettingsError, match=r"could not write .*training.safetensors"):
            training.save()
        with pytest.raises(SettingsError, match=r"could not write"):
            export(config, training.network, config.run / "checkpoint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (config.run / "training.safetensors").read_bytes() == good
    assert [p.name for p in config.run.iterdir() if p.is_file()] == ["training.safetensors"]
    assert not list((config.run / "checkpoint").iterdir()), "nothing half-written"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 80}, "init_from: .* vocab_size is 64 but the target has 80"),
        ({"hidden_size": 32}, "init_from: .* hidden_size is 64 but the target has 32"),
    ],
)
def test_a_start_from_a_drafter_of_another_target_is_refused(
    config: RunConfig, changed: dict[str, int], message: str, write_target: Callable[..., Path], tmp_path: Path
) -> None:
    from drafter.train.start import read_start

    export(config, start_training(config).network, tmp_path / "drafter")
    vocab_size = changed.pop("vocab_size", 64)
    other = narrower(tmp_path / "other", write_target, vocab_size, **changed)
    with pytest.raises(SettingsError, match=message):
        read_start(tmp_path / "drafter", other)


def narrower(folder: Path, write_target: Callable[..., Path], vocab_size: int, hidden_size: int = 64) -> Path:
    """A target of another width, by its config alone: that is read first."""
    import json

    write_target(folder, "llama", vocab_size=vocab_size)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": hidden_size, "head_dim": 16}))
    return folder


def test_a_truncated_start_is_refused(config: RunConfig, tmp_path: Path) -> None:
    export(config, start_training(config).network, tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-200])
    other = replace(config, run=tmp_path / "other", init_from=tmp_path / "drafter")
    with pytest.raises(SettingsError, match=r"init_from: .*model.safetensors"):
        start_training(other)


def test_tensorboard_events_are_written_or_the_missing_package_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(config, loop=replace(config.loop, tensorboard=True))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingsError, match=r"tensorboard: the package is missing; pip install"):
        start_training(asked)
    monkeypatch.undo()
    pytest.importorskip("tensorboard")
    training = start_training(asked)
    list(training.train())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.run / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    assert {"loss", "grad_norm", "held_out/tau_sampled"} <= set(names)
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 4\n", "has the key 'stepz', which is no flag of `dspark train`"),
        ("- 3\n", "must be a mapping of flags"),
        ("target: x\nlayers: 0,1\n", "--data is missing"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_recipe_is_named(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text)
    assert main(["train", "--recipe", str(recipe)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_recipe_gives_flags_and_the_command_line_wins(config: RunConfig, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"target: {config.target}\nlayers: 0,1\nkind: dspark\nhead: rnn\nmask-token-id: 0\nsteps: 9\n"
        "positions-per-step: 100\nmarkov-rank: 4\ndraft-vocabulary: 60\ndtype: float32\nno-confidence: true\n"
    )
    arguments = ["train", "--recipe", str(recipe), "--data", str(config.states), "--run", str(tmp_path / "run")]
    assert main([*arguments, "--steps", "2", "--threads", "1", "--out", str(tmp_path / "out")]) == 0
    _, counters = read_state(tmp_path / "run" / "training.safetensors")
    assert counters["step"] == 2
    from drafter.checkpoint import read_drafter

    arch = read_drafter(tmp_path / "out")
    assert arch.kind == "dspark-rnn" and arch.markov_rank == 4 and not arch.has_confidence


def test_a_flag_wins_over_the_recipe_also_where_it_says_the_default(tmp_path: Path) -> None:
    from services.cli import _parser

    (tmp_path / "recipe.yaml").write_text("steps: 3000\nanchors: 7\n")
    said = _parser().parse_args(["train", "--steps", "1000", "--recipe", str(tmp_path / "recipe.yaml")])
    options = said.whole(said)
    assert (options.steps, options.anchors, options.optimiser, options.data) == (1000, 7, "muon", None)


def test_every_committed_recipe_is_understood() -> None:
    from services.cli import _parser
    from services.train_commands import run_config

    folder = Path(__file__).parents[2] / "drafters" / "recipes"
    kinds = set()
    for path in sorted(folder.glob("*.yaml")):
        command = "prepare" if path.stem == "data" else "train"
        said = _parser().parse_args([command, "--recipe", str(path), "--data", "d"])
        options = said.whole(said)
        if command == "train":
            kinds.add(path.stem)
            options.run_folder = Path("r")
            assert run_config(options).shape.kind == path.stem.split("-")[0]
    assert kinds == {"dspark", "dspark-gated", "dspark-rnn", "dflash", "eagle3", "mtp"}


def test_the_script_for_a_gpu_runs_anywhere(config: RunConfig, tmp_path: Path) -> None:
    import os
    import subprocess

    from tests.train_demo import make_prompts, make_target

    make_target(tmp_path / "target")
    make_prompts(tmp_path / "prompts.jsonl", 30)
    root = Path(__file__).parents[2]
    environment = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(root),
        "OUT": str(tmp_path / "out"),
        "TARGET": str(tmp_path / "target"),
        "DEVICE": "cpu",
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
        "PREPARE_FLAGS": "--shares none --max-tokens 16 --threads 1",
        "ROWS": "16",
        "POSITIONS": "200",
        "OMP_NUM_THREADS": "1",
    }
    flags = ["--layers", "0", "--mask-token-id", "3", "--draft-vocabulary", "60", "--steps", "3", "--threads", "1"]
    script = [str(root / "drafters" / "recipes" / "gpu.sh"), *flags, "--held-out-every", "4", "--markov-rank", "8"]
    subprocess.run(script, env={**os.environ, **environment}, check=True, timeout=600)
    assert (tmp_path / "out" / "drafter-dspark" / "model.safetensors").is_file()
