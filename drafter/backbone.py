"""The parallel part of a DSpark or DFlash drafter: context features in, hidden states of a whole block out.

The draft KV cache holds context rows only, at the target's slots: the features of every committed position are projected
once (`absorb`), and a block's own keys and values live only for its forward. Knows no vocabulary head and no sampling.

Shapes: n context rows, R requests, w slots of a block, m captured target layers, L draft layers, H query heads, KV key
heads, G = H / KV, hd head dim, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.checkpoint import Checkpoint
from scheduler.wire import IntArray
from verifier.attention import Span, split_spans
from verifier.features import CommittedFeatures
from verifier.kv import PagedKV, padded_tables
from verifier.layers import Linear, Rotary, rms_norm, split_heads_norm
from verifier.model import DecoderLayer


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Where a request's block begins: its anchor at position `start`, after `start` context rows in these KV blocks."""

    anchor_id: int
    start: int
    block_ids: IntArray


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
        for committed in _merged(messages) if self.device.type == "cpu" else messages:
            self._write(committed)

    def _write(self, committed: CommittedFeatures) -> None:
        rows = self._context_rows(committed.features.to(self.device, self.dtype), committed.positions.to(self.device))
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
        attend = BlockAttention(
            self.pool, starts, width, num_heads=self.num_heads, dtype=self.dtype, device=self.device
        )
        hidden = self.embed_tokens.index_select(0, torch.from_numpy(ids.ravel()).to(self.device))
        cos_sin = self.rotary.at(torch.from_numpy(positions.ravel()).to(self.device))
        for index, layer in enumerate(self.layers):
            qkv = self.rotary.rotate(layer.project(hidden), cos_sin)
            hidden = layer.finish(hidden, attend(index, qkv))
        return rms_norm(hidden, self.norm, self.eps).view(len(starts), width, -1)


def _merged(messages: Sequence[CommittedFeatures]) -> Sequence[CommittedFeatures]:
    """One message for those that piled up, which costs little more than one of them, unless two write the same slot."""
    if len(messages) < 2:
        return messages
    slots = torch.cat([m.slots for m in messages])
    if len(slots.unique()) < len(slots):
        return messages
    features, positions = torch.cat([m.features for m in messages]), torch.cat([m.positions for m in messages])
    return [CommittedFeatures(features, slots, positions)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar context length that share one padded call.

    rows [B]: their places in the batch, None when that is all of it in order. blocks [B * n]: block tables. context_len:
    the longest context. mask [B, 1, 1, context_len + w] hides padding; None when there is none.
    """

    num_requests: int
    rows: Tensor | None
    blocks: Tensor
    context_len: int
    mask: Tensor | None


class BlockAttention:
    """Non-causal attention of blocks: a slot sees its request's context and the whole block. Built once per proposal."""

    def __init__(
        self,
        pool: PagedKV,
        starts: Sequence[BlockStart],
        width: int,
        *,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pool, self.width, self.num_heads = pool, width, num_heads
        self.dtype, self.device = dtype, device
        spans = [Span(i, width, s.start, s.block_ids) for i, s in enumerate(starts)]
        self.buckets = [self._bucket(chosen, len(spans)) for chosen in split_spans(spans, pool.block_size)]

    def _bucket(self, spans: Sequence[Span], num_requests: int) -> Bucket:
        lengths = [s.start for s in spans]
        longest = max(lengths)
        tables = padded_tables([s.block_ids for s in spans], -(-longest // self.pool.block_size))
        mask = None
        if min(lengths) < longest:
            hidden = np.arange(longest + self.width) < longest
            hidden = hidden & (np.arange(longest + self.width) >= np.array(lengths)[:, None])
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None, :].to(self.device)
        order = [s.first_row for s in spans]
        rows = None if order == list(range(num_requests)) else torch.tensor(order, device=self.device)
        return Bucket(len(spans), rows, torch.from_numpy(tables.ravel()).to(self.device), longest, mask)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [R * w, H + 2 KV, hd], rotated -> [R * w, H * hd]."""
        blocks = qkv.view(-1, self.width, qkv.shape[-2], qkv.shape[-1])
        if self.buckets[0].rows is None:
            return self._attend(layer, blocks, self.buckets[0]).flatten(0, 1)
        out = qkv.new_empty(len(blocks), self.width, self.num_heads * qkv.shape[-1])
        for bucket in self.buckets:
            assert bucket.rows is not None
            out.index_copy_(0, bucket.rows, self._attend(layer, blocks.index_select(0, bucket.rows), bucket))
        return out.flatten(0, 1)

    def _attend(self, layer: int, blocks: Tensor, bucket: Bucket) -> Tensor:
        """blocks [B, w, H + 2 KV, hd] -> [B, w, H * hd]. Heads that share a key head become query rows of it: K and V
        are not repeated."""
        b, w, hd, num_kv_heads = bucket.num_requests, self.width, blocks.shape[-1], self.pool.num_kv_heads
        context = self.pool.pool[layer].index_select(0, bucket.blocks).view(b, -1, 2 * num_kv_heads, hd)
        seen = torch.cat((context[:, : bucket.context_len], blocks[:, :, self.num_heads :]), dim=1).transpose(1, 2)
        group = self.num_heads // num_kv_heads
        queries = blocks[:, :, : self.num_heads].reshape(b, w, num_kv_heads, group, hd).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            queries.reshape(b, num_kv_heads, w * group, hd),
            seen[:, :num_kv_heads],
            seen[:, num_kv_heads:],
            attn_mask=bucket.mask,
        )
        return attended.view(b, num_kv_heads, w, group, hd).transpose(1, 2).reshape(b, w, -1)
