"""Two gloo processes train what one process with the whole batch trains; accumulation is the same sum in parts."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter.train.loop import LoopConfig
from drafter.train.optimiser import OptimiserConfig
from drafter.train.recipe import DrafterShape, RunConfig, start_training
from drafter.train.states import States, shard_path, write_shard

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(llama_target: Path, tmp_path: Path) -> RunConfig:
    random = torch.Generator().manual_seed(0)
    sequences = []
    for i in range(24):
        ids = torch.randint(2, 64, (18 + i,), generator=random, dtype=torch.int32)
        features, last = (torch.randn(len(ids), width, generator=random) for width in (128, 64))
        meta = {"prompt_id": f"{i:08x}", "domain": "chat", "temperature": 1.0}
        sequences.append(States(ids, features, last, torch.full((len(ids),), 60.0), 3, meta))
    write_shard(shard_path(tmp_path / "states", 0, 0), sequences)
    loop = LoopConfig(
        total_steps=4,
        positions_per_step=160,
        anchors_per_sequence=8,
        held_out_every=5,
        evaluate_every=2,
        log_every=1,
        optimiser=OptimiserConfig(kind="adamw", lr=3e-3),
    )
    shape = DrafterShape(target_layer_ids=(0, 1), mask_token_id=0, block_size=4, markov_rank=8, draft_vocab_size=60)
    return RunConfig(
        str(llama_target), tmp_path / "states", tmp_path / "run", shape, loop, dtype="float32", device="cpu", max_len=64
    )


def train_in_processes(config: RunConfig, num_ranks: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """What each rank left; several are started by torchrun. Processes of their own: what other tests did to this one's torch is
    none of their business."""
    folder.mkdir()
    (folder / "config").write_bytes(pickle.dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    script = [str(Path(__file__).with_name("train_rank.py")), str(folder / "config"), str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = torchrun if num_ranks > 1 else [sys.executable]
    subprocess.run([*launcher, *script], env=environment, check=True, timeout=300)
    return [load_file(folder / f"out-{rank}.safetensors") for rank in range(num_ranks)]


def test_two_processes_train_what_one_with_the_whole_batch_trains(config: RunConfig, tmp_path: Path) -> None:
    first, second = train_in_processes(config, 2, tmp_path / "two")
    assert len(first.pop("held_out")) == 2 and len(second.pop("held_out")) == 0, "one process evaluates"
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    # one process, the same plan: two passes that add up to one batch
    alone_config = replace(config, run=tmp_path / "alone", loop=replace(config.loop, accumulate=2))
    began = start_training(alone_config)
    before = {name: parameter.detach().clone() for name, parameter in began.network.named_parameters()}
    (single,) = train_in_processes(alone_config, 1, tmp_path / "one")
    alone, resumed = start_training(alone_config), start_training(config)
    for name in before:
        parameter = single[name]
        theirs, ours = resumed.optimiser.first[name], alone.optimiser.first[name]
        assert float((theirs - ours).norm()) <= 0.02 * float(ours.norm()), f"mean gradient of {name}"
        # AdamW divides by the size of a gradient: where that is nothing but rounding, so is the step
        clear = ours.abs() > 1e-5
        moved, apart = (parameter - before[name])[clear], (first[name] - parameter)[clear]
        assert float(apart.norm()) <= 0.02 * float(moved.norm()), name
    assert losses_of(config) == pytest.approx(losses_of(alone_config), abs=2e-3)
    assert resumed.step == 4 and resumed.num_positions == alone.num_positions, "one process goes on where two stopped"


def losses_of(config: RunConfig) -> list[float]:
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_accumulated_passes_add_up_to_one_batch(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = (start_training(replace(config, run=tmp_path / name)) for name in "ab")
    for training in (once, twice):
        # gradients stay where they are
        monkeypatch.setattr(training.optimiser, "step", lambda factor: 1.0)
    passes = once.next_batches()
    assert len(passes) == 1 and len(passes[0]) > 3
    cut = len(passes[0]) // 2
    both = twice.update([passes[0][:cut], passes[0][cut:]])
    assert once.update(passes) == pytest.approx(both, rel=1e-3, abs=2e-4)
    assert twice.num_positions == once.num_positions
    for (name, a), (_, b) in zip(once.network.named_parameters(), twice.network.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
