"""The parallel part of a DSpark or DFlash drafter: context features in, hidden states of a whole block out.

The draft KV cache holds context rows only, at the target's slots: the features of every committed position are projected
once (`absorb`), and a block's own keys and values live only for its forward. Knows no vocabulary head and no sampling.

Shapes: n context rows, R requests, w slots of a block, m captured target layers, L draft layers, H query heads, KV key
heads, G = H / KV, hd head dim, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafter.block_attention import BlockStart, block_attention
from drafter.checkpoint import Checkpoint
from verifier.features import CommittedFeatures, merged
from verifier.kv import PagedKV, finite_in_place
from verifier.layers import Linear, Rotary, rms_norm, split_heads_norm
from verifier.model import DecoderLayer, LayerStack


class Backbone:
    """max_len: positions that the rotary tables cover; a block must end before it."""

    def __init__(
        self, checkpoint: Checkpoint, pool: PagedKV, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        arch, weights = checkpoint.arch, checkpoint.tensors
        decoder = arch.decoder
        self.pool, self.dtype, self.device, self.max_len = pool, dtype, device, max_len
        self.eps, self.mask_token_id = decoder.rms_norm_eps, arch.mask_token_id
        self.num_layers, self.num_heads = decoder.num_layers, decoder.num_heads
        self.num_kv_heads, self.head_dim = decoder.num_kv_heads, decoder.head_dim
        self.embed_tokens, self.norm = weights["embed_tokens.weight"], weights["norm.weight"]
        self.fc, self.hidden_norm = Linear(weights["fc.weight"]), weights["hidden_norm.weight"]
        self.layers = [DecoderLayer(decoder, weights, f"layers.{i}") for i in range(decoder.num_layers)]
        self.rotary = Rotary(decoder, max_len, dtype, device)
        self._stack = LayerStack(self.layers, self.rotary)
        # every layer projects the same context rows, so that one product gives the keys and values of all
        names = [f"layers.{i}.self_attn.{p}_proj" for i in range(decoder.num_layers) for p in "kv"]
        bias = torch.cat([weights[f"{name}.bias"] for name in names]) if decoder.qkv_bias else None
        self.context_kv = Linear(torch.cat([weights[f"{name}.weight"] for name in names]), bias)
        self.context_k_norm: Tensor | None = None
        if decoder.qk_norm:
            norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(decoder.num_layers)]
            self.context_k_norm = torch.stack(norms)[:, None, :]

    def absorb(self, messages: Sequence[CommittedFeatures]) -> None:
        """Writes the context rows of newly committed positions, in all layers; of two rows for a slot the later stays."""
        for committed in merged(messages) if self.device.type == "cpu" else messages:
            self._write(committed)

    def _write(self, committed: CommittedFeatures) -> None:
        rows = self._context_rows(committed.features.to(self.device, self.dtype), committed.positions.to(self.device))
        finite_in_place(rows)
        slots = committed.slots.to(self.device)
        for layer in range(self.num_layers):
            self.pool.write(layer, slots, rows[:, layer])

    def _context_rows(self, features: Tensor, positions: Tensor) -> Tensor:
        """features [n, m d], positions [n] -> rotated keys, then values [n, L, 2 KV, hd]."""
        context = rms_norm(self.fc(features), self.hidden_norm, self.eps)
        rows = self.context_kv(context).view(-1, self.num_layers, 2 * self.num_kv_heads, self.head_dim)
        if self.context_k_norm is not None:
            keys = rows[:, :, : self.num_kv_heads]
            keys.copy_(split_heads_norm(keys, self.context_k_norm, self.eps))
        # rows past the tables belong to requests that no longer draft: they are written, never read
        cos, sin = self.rotary.at(positions.clamp_max(self.max_len - 1), self.num_kv_heads)
        return self.rotary.rotate(rows, (cos.unsqueeze(1), sin.unsqueeze(1)))

    def forward(self, starts: Sequence[BlockStart], width: int) -> Tensor:
        """One block of `width` slots per request, anchor and masks -> hidden states after the last norm [R, w, d]."""
        ids = np.full((len(starts), width), self.mask_token_id, dtype=np.int64)
        ids[:, 0] = [s.anchor_id for s in starts]
        positions = np.array([s.start for s in starts], dtype=np.int64)[:, None] + np.arange(width)
        flat_positions = torch.from_numpy(positions.ravel())
        attend = block_attention(self.pool, self.rotary, starts, width, flat_positions, num_heads=self.num_heads)
        hidden = self.embed_tokens.index_select(0, torch.from_numpy(ids.ravel()).to(self.device))
        hidden, _ = self._stack.run(hidden, flat_positions.to(self.device), attend)
        return rms_norm(hidden, self.norm, self.eps).view(len(starts), width, -1)
