"""Several processes that train one drafter: who is who, and sums over all of them. Started by torchrun.

Must not know what is trained.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Ranks:
    """rank: of this process, 0 writes files. size: number of processes. local: which device of its machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def summed(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values


def join(device: str) -> Ranks:
    """The processes that torchrun has started, joined (gloo on a CPU, NCCL on GPUs); or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" or not torch.cuda.is_available() else "nccl"
        try:
            dist.init_process_group(backend, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(f"torchrun: the processes did not find each other: {error}") from None
    return Ranks(rank, size, local)


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
