"""One process of a data-parallel run, for tests: trains as torchrun started it and leaves its parameters in a file."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter.train.parallel import leave
from drafter.train.recipe import start_training


def main(config_file: str, out: str) -> None:
    torch.set_num_threads(1)
    training = start_training(pickle.loads(Path(config_file).read_bytes()))
    losses = [row["held_out"]["tau_sampled"] for row in training.train() if row]
    parameters = {name: p.detach() for name, p in training.network.named_parameters()}
    save_file({**parameters, "held_out": torch.tensor(losses)}, f"{out}-{training.ranks.rank}.safetensors")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
