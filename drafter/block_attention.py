"""Attention of a block of drafts: every slot sees its request's context rows in the cache and the whole block, both ways.

Shapes: R requests, w slots of a block, H query heads, KV key heads, hd head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scheduler.wire import IntArray
from verifier import native
from verifier.attention import Span, split_spans
from verifier.kv import PagedKV, padded_tables
from verifier.layers import Rotary
from verifier.native_step import AttentionStep, Rows


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Where a request's block begins: its anchor at position `start`, after context rows in these KV blocks.

    context_from: see DraftAsk; what stands before it is not looked at.
    """

    anchor_id: int
    start: int
    block_ids: IntArray
    context_from: int = 0

    @property
    def num_context(self) -> int:
        return self.start - self.context_from

    def context_blocks(self, block_size: int) -> IntArray:
        return self.block_ids[self.context_from // block_size :]


def block_attention(
    pool: PagedKV, rotary: Rotary, starts: Sequence[BlockStart], width: int, positions: Tensor, *, num_heads: int
) -> AttentionStep | TorchBlockAttention:
    """The attention of one proposal, by the native kernel where it applies. positions [R * w] of the slots, on the CPU."""
    tensors = pool.pool
    if native.usable(tensors.dtype, tensors.device, tensors.shape[-1], num_heads // pool.num_kv_heads):
        lengths = np.array([s.num_context for s in starts])
        num_blocks = max(1, -(-int(lengths.max()) // pool.block_size))
        # the context is read from the cache, the block from its projections
        return AttentionStep(
            pool=tensors,
            rows=[Rows(i * width, width, i) for i in range(len(starts))],
            tables=padded_tables([s.context_blocks(pool.block_size) for s in starts], num_blocks),
            limits=np.repeat(lengths, width),
            positions=positions,
            slots=None,
            cos_sin=rotary.tables,
            num_heads=num_heads,
            num_kv_heads=pool.num_kv_heads,
            head_dim=tensors.shape[-1],
            block_size=pool.block_size,
            extra=width,
            extra_first=np.repeat(np.arange(len(starts)) * width, width),
        )
    return TorchBlockAttention(pool, starts, width, num_heads=num_heads)


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


class TorchBlockAttention:
    """By torch operators, on any device and dtype."""

    rotates = False

    def __init__(self, pool: PagedKV, starts: Sequence[BlockStart], width: int, *, num_heads: int) -> None:
        self.pool, self.width, self.num_heads = pool, width, num_heads
        self.dtype, self.device = pool.pool.dtype, pool.pool.device
        spans = [Span(i, width, s.num_context, s.context_blocks(pool.block_size)) for i, s in enumerate(starts)]
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
