"""What a recipe must know of each kind of drafter: its network, its keys in config.json, the losses it was published with.

Owns the list of kinds that can be trained. Must not know data or the loop.
"""

from __future__ import annotations

import math
from typing import Any

from drafter.architecture import FAMILIES, SUFFIXES
from drafter.train.chain import Eagle3Network, MtpNetwork
from drafter.train.loss import LossConfig
from drafter.train.network import DraftNetwork
from scheduler.errors import SettingsError

KINDS = ("dspark", "dflash", "eagle3", "mtp")
_NETWORKS: dict[str, type[DraftNetwork]] = {"dspark": DraftNetwork, "eagle3": Eagle3Network, "mtp": MtpNetwork}
# Eagle3 weighs its i-th step by 0.8^i.
_STEP_LOSS_DECAY = 0.8
# dspark: DeepSpec's own plus what helps short trainings (LossConfig.kl). The others: as published.
_LOSSES = {
    "dspark": LossConfig(kl=0.2),
    "dflash": LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    "eagle3": LossConfig(ce=0.0, tv=0.0, kl=1.0, confidence=0.0, decay=-1 / math.log(_STEP_LOSS_DECAY)),
    "mtp": LossConfig(ce=1.0, tv=0.0, confidence=0.0),
}


def design_of(kind: str) -> str:
    """dflash is a DSpark without heads."""
    if kind not in KINDS:
        raise SettingsError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    return "dspark" if kind == "dflash" else kind


def network_class(kind: str) -> type[DraftNetwork]:
    return _NETWORKS[design_of(kind)]


def published_loss(kind: str) -> LossConfig:
    design_of(kind)
    return _LOSSES[kind]


def architecture_name(kind: str, model_type: object) -> str:
    """architectures[0]. Raises SettingsError for a target whose drafters are not known."""
    prefixes = {family: prefix for prefix, family in FAMILIES.items()}
    if model_type not in prefixes:
        raise SettingsError(f"target: model_type {model_type!r} has no drafter yet; supported: {', '.join(prefixes)}")
    suffixes = {design: suffix for suffix, design in SUFFIXES.items()}
    return prefixes[str(model_type)] + suffixes[design_of(kind)]


def chain_keys(kind: str, block_size: int, target_layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What config.json says of an Eagle3 or MTP drafter beside the target's own keys."""
    eagle3 = {"step_loss_decay": _STEP_LOSS_DECAY, "draft_num_hidden_layers": 1}
    return {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "ttt_length": block_size,
        "target_layer_ids": list(target_layer_ids if kind == "eagle3" else target_layer_ids[-1:]),
        **(eagle3 if kind == "eagle3" else {}),
    }
