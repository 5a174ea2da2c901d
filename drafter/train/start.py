"""Where a drafter starts: its draft vocabulary and feature scale from the target's answers, its weights from another drafter.

Must not know the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.checkpoint import Checkpoint, load_checkpoint
from drafter.train.blocks import valid_anchors
from drafter.train.network import DraftNetwork
from drafter.train.states import States
from scheduler.errors import SettingsError

# Rows of the target's law that the draft vocabulary is chosen from: their mean mass is smoother than counts.
_LAW_ROWS = 12_000


@torch.no_grad()
def choose_vocabulary(sequences: Iterable[States], head: Tensor, size: int, stop_ids: Sequence[int]) -> Tensor:
    """[Vd] ascending ids: the stop ids and those with most probability mass under the target's laws and in its answers."""
    num_ids = head.shape[0]
    if size <= 0 or size >= num_ids:
        return torch.arange(num_ids)
    mass, rows = torch.zeros(num_ids), 0
    for states in sequences:
        for start, end in states.spans:
            mass += torch.bincount(states.ids[start:end].long(), minlength=num_ids)
        if rows < _LAW_ROWS:
            # every fourth row of a sequence: neighbours say much the same
            last = states.last[valid_anchors(states)[::4].to(states.last.device)]
            mass += 4 * F.linear(last.to(head.device, head.dtype), head).float().softmax(-1).sum(0).cpu()
            rows += len(last)
    mass[list(stop_ids)] = float("inf")
    return mass.topk(size).indices.sort().values


def feature_scale(sequences: Iterable[States]) -> Tensor:
    """[m d] reciprocal root mean square of each feature: raw residual streams have a few dimensions a thousand times the rest."""
    total, rows = None, 0
    for states in sequences:
        squares = states.features[:-1].float().square().sum(0).cpu()
        total = squares if total is None else total + squares
        rows += len(states.features) - 1
    if total is None:
        raise SettingsError("there is no sequence to train on")
    return (total / rows).sqrt().clamp_min(1e-4).reciprocal()


def read_start(folder: Path, target_folder: Path) -> Checkpoint:
    """A drafter of this target to go on from. Raises SettingsError."""
    try:
        return load_checkpoint(folder, target_folder, torch.float32, torch.device("cpu"))
    except SettingsError as error:
        raise SettingsError(f"init_from: {error}") from None


def check_start(checkpoint: Checkpoint, network: DraftNetwork, folder: Path) -> None:
    """Layers, widths and heads must be this run's; block size and mask may differ, no weight depends on them. From a vanilla
    Markov head the others can begin."""
    for field in fields(checkpoint.arch):
        theirs, ours = getattr(checkpoint.arch, field.name), getattr(network.arch, field.name)
        grows = field.name == "head_type" and theirs == "vanilla" and network.arch.markov_rank
        if field.name not in ("block_size", "mask_token_id", "variable_block") and theirs != ours and not grows:
            raise SettingsError(
                f"init_from: {folder} has {field.name} {theirs}, this run {ours}; change the one or other"
            )
