"""The input of an Eagle3 layer (DeepSpec): [input_layernorm(embedding); hidden_norm(state)], with the raw state as residual.

The target's state is fc(captured features), without a norm. Must not know caches or attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.checkpoint import Checkpoint
from verifier.layers import Linear, rms_norm


class Eagle3Cell:
    def __init__(self, checkpoint: Checkpoint) -> None:
        weights = checkpoint.tensors
        self._eps = checkpoint.arch.decoder.rms_norm_eps
        self._fc = Linear(weights["fc.weight"])
        self._input_norm = weights["layers.0.input_layernorm.weight"]
        self._hidden_norm = weights["layers.0.hidden_norm.weight"]

    def state(self, features: Tensor) -> Tensor:
        return self._fc(features)

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(embeddings, self._input_norm, self._eps), rms_norm(states, self._hidden_norm, self._eps)
        return torch.cat(normed, dim=-1), states
