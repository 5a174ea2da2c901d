"""The input of a multi-token-prediction module (after DeepSeek-V3): eh_proj [enorm(embedding); hnorm(state)], then a plain
decoder layer, whose input norm is applied here.

The target's state is the raw output of the one captured layer. Must not know caches or attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.checkpoint import Checkpoint
from verifier.layers import Linear, rms_norm


class MtpCell:
    def __init__(self, checkpoint: Checkpoint) -> None:
        weights = checkpoint.tensors
        self._eps = checkpoint.arch.decoder.rms_norm_eps
        self._enorm, self._hnorm = weights["enorm.weight"], weights["hnorm.weight"]
        self._eh_proj = Linear(weights["eh_proj.weight"])
        self._input_norm = weights["layers.0.input_layernorm.weight"]

    def state(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(embeddings, self._enorm, self._eps), rms_norm(states, self._hnorm, self._eps)
        residual = self._eh_proj(torch.cat(normed, dim=-1))
        return rms_norm(residual, self._input_norm, self._eps), residual
