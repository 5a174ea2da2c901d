"""Training runs on a small target: it learns, resumes exactly, measures honestly, and stops with one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.checkpoint import load_checkpoint, read_drafter
from drafter.train.designs import KINDS, published_loss
from drafter.train.loop import LoopConfig, Training
from drafter.train.measure import replay_greedy
from drafter.train.optimiser import OptimiserConfig
from drafter.train.order import DataOrder, held_out
from drafter.train.recipe import DrafterShape, RunConfig, export, start_training, train
from drafter.train.states import StatesFolder
from scheduler.errors import SettingsError
from services.cli import main

SHAPE = DrafterShape(target_layer_ids=(0, 1), mask_token_id=0, block_size=4, markov_rank=8, draft_vocab_size=60)
LOOP = LoopConfig(
    total_steps=6,
    positions_per_step=200,
    anchors_per_sequence=16,
    held_out_every=4,
    evaluate_every=3,
    log_every=1,
    optimiser=OptimiserConfig(kind="muon", lr=3e-3, muon_lr=1e-2),
)


@pytest.fixture(scope="module")
def target(llama_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target with a tokenizer of its own: one word per id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(llama_target, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1")
    fast.chat_template = "w2 {% for message in messages %}{{ message['content'] }}{% endfor %} w3"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def states(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written through the command."""
    folder = tmp_path_factory.mktemp("states")
    prompts = folder / "prompts.jsonl"
    rows = [
        {"turns": [" ".join(f"w{(7 * i + j * j) % 60 + 4}" for j in range(4))], "domain": "math"} for i in range(40)
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["prepare", "--target", str(target), "--data", str(folder), "--threads", "1"]
    arguments += [
        "--keep-states",
        "--layers",
        "0,1",
        "--prompts",
        str(prompts),
        "builtin",
        "--count",
        "60",
        "--max-tokens",
        "24",
        "--rows",
        "8",
    ]
    assert main(arguments) == 0
    return folder


@pytest.fixture
def config(target: Path, states: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(str(target), states, tmp_path / "run", SHAPE, LOOP, dtype="float32", max_len=512)


def parameters(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training.network.named_parameters()}


def of_kind(config: RunConfig, kind: str) -> RunConfig:
    """The same run with another kind of drafter and its published loss."""
    loop = replace(config.loop, loss=published_loss(kind), variable_block=kind in ("dspark", "dflash"))
    return replace(config, shape=replace(config.shape, kind=kind), loop=loop)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_resuming_continues_exactly(kind: str, config: RunConfig, tmp_path: Path) -> None:
    config = of_kind(config, kind)
    whole = start_training(config)
    list(whole.train())
    halves = replace(config, run=tmp_path / "halves")
    first = start_training(halves)
    next(first.train())
    assert first.step == 3
    second = start_training(halves)
    assert second.step == 3 and second.num_positions == first.num_positions
    list(second.train())
    assert second.step == whole.step == 6
    for name, expected in parameters(whole).items():
        torch.testing.assert_close(parameters(second)[name], expected, rtol=0, atol=0)
    rows = [json.loads(line) for line in (halves.run / "metrics.jsonl").read_text().splitlines()]
    expected_rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    losses = [[row["loss"] for row in found if "loss" in row] for found in (rows, expected_rows)]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_training_raises_the_accepted_length(kind: str, config: RunConfig) -> None:
    config = of_kind(config, kind)
    learning = replace(
        config, loop=replace(config.loop, total_steps=120, evaluate_every=60, log_every=20, positions_per_step=300)
    )
    training = start_training(learning)
    before = training.evaluate()["held_out"]
    after = [row["held_out"] for row in train(learning)][-1]
    assert after["tau_sampled"] > before["tau_sampled"] + 0.05
    assert after["tau_greedy"] > before["tau_greedy"]
    checkpoint = load_checkpoint(learning.run / "checkpoint", Path(config.target), torch.float32, torch.device("cpu"))
    assert checkpoint.arch.block_size == 4 and checkpoint.arch.kind.startswith(kind)
    losses = [json.loads(line) for line in (learning.run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in losses if "loss" in row]
    assert losses[-1] < losses[0]


def test_held_out_prompts_are_never_trained_on(config: RunConfig) -> None:
    folder = StatesFolder(config.states)
    every = LOOP.held_out_every
    order = DataOrder(folder, every, torch.Generator().manual_seed(0))
    known = dict(folder.named())
    trained = [known[order.next()] for _ in range(200)]
    kept = [s.meta for s in order.held_out_sequences(100)]
    assert kept and all(held_out(meta, every) for meta in kept) and not any(held_out(meta, every) for meta in trained)
    assert order.epoch >= 1 and {m["prompt_id"] for m in trained} == {
        meta["prompt_id"] for _, meta in folder.named() if not held_out(meta, every)
    }


def test_a_loss_that_is_no_number_stops_with_one_line(config: RunConfig) -> None:
    training = start_training(config)
    with torch.no_grad():
        training.network.fc.weight[0, 0] = math.nan
    with pytest.raises(SettingsError, match="loss is nan at step 0; lower the learning rate"):
        list(training.train())


def test_a_state_of_another_drafter_is_refused(config: RunConfig) -> None:
    start_training(config).save()
    wider = replace(config, shape=replace(SHAPE, markov_rank=16))
    with pytest.raises(SettingsError, match="is of another drafter: markov_head"):
        start_training(wider)
    other = replace(config, loop=replace(LOOP, optimiser=OptimiserConfig(kind="adamw")))
    with pytest.raises(SettingsError, match="trained with another optimiser"):
        start_training(other)


def test_a_truncated_state_is_refused(config: RunConfig) -> None:
    start_training(config).save()
    path = config.run / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SettingsError, match=r"no readable training state \(truncated\?\)"):
        start_training(config)


def test_a_drafter_over_the_whole_vocabulary_trains_too(config: RunConfig) -> None:
    whole = replace(config, shape=replace(SHAPE, draft_vocab_size=0, markov_rank=0), loop=replace(LOOP, total_steps=2))
    training = start_training(whole)
    list(training.train())
    export(whole, training.network, whole.run / "out")
    checkpoint = load_checkpoint(whole.run / "out", Path(config.target), torch.float32, torch.device("cpu"))
    assert checkpoint.draft_vocab_ids is None and checkpoint.arch.kind == "dflash"


def test_prepared_answers_are_not_written_twice(states: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prepare", "--target", str(target), "--data", str(states), "--threads", "1"]
    arguments += ["--keep-states", "--layers", "0,1"]
    files = sorted(states.iterdir())
    prompts = [str(states / "prompts.jsonl"), "builtin"]
    assert main([*arguments, "--prompts", *prompts, "--count", "60", "--max-tokens", "24"]) == 0
    assert sorted(states.iterdir()) == files


@pytest.mark.parametrize(
    ("accepted", "tokens", "rounds"),
    [([0, 0, 0], 3, 3), ([2, 0, 0], 3, 1), ([1, 3, 1, 0], 4, 2), ([9, 0, 0, 0], 4, 1), ([], 0, 0)],
)
def test_greedy_rounds_are_replayed_from_anchor_to_anchor(accepted: list[int], tokens: int, rounds: int) -> None:
    assert replay_greedy(accepted) == (tokens, rounds)


@pytest.fixture
def run_arguments(target: Path, states: Path, tmp_path: Path) -> Iterator[list[str]]:
    arguments = ["--target", str(target), "--data", str(states), "--layers", "0,1", "--threads", "1"]
    yield [*arguments, "--run", str(tmp_path / "run"), "--mask-token-id", "0", "--markov-rank", "4"]


@pytest.mark.parametrize("kind", KINDS)
def test_run_and_export_work_from_the_command_line(kind: str, run_arguments: list[str], tmp_path: Path) -> None:
    run_arguments += ["--kind", kind]
    run = ["train", *run_arguments, "--steps", "2", "--positions-per-step", "100", "--draft-vocabulary", "30"]
    assert main([*run, "--out", str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    arch = read_drafter(tmp_path / "out")
    assert (arch.kind.removesuffix("-vanilla"), arch.block_size) == (kind, 1 if kind == "mtp" else 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--data", "/nonexistent"], "holds no target states and no answers"),
        (["--layers", "1,0"], "strictly increasing"),
        (["--layers", "0"], "target_layer_ids need"),
        (["--mask-token-id", "64"], "mask_token_id must be a whole number"),
    ],
)
def test_bad_input_gives_one_line(
    run_arguments: list[str], changed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_arguments, *changed, "--steps", "1"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("dspark: ") and message in lines[0]


def test_exporting_an_untrained_run_is_refused(
    run_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_arguments, "--steps", "0", "--out", str(tmp_path / "out")]) == 2
    assert "train first" in capsys.readouterr().err
