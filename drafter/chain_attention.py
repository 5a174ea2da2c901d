"""Attention of one drafted token at a time: each sees its request's committed rows and the rows drafted before it.

The committed rows are gathered from the cache once per proposal; the drafted ones are written behind them. Position 0 has no
row (drafter/chain.py), so a request with its anchor at `start` has start - 1 committed rows, at slots 1..start - 1; one whose
context begins later has none at its first slot either, for the state before that one may be missing.

Shapes: R requests, w drafted tokens, H query heads, KV key heads, hd head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.block_attention import BlockStart
from verifier.attention import Span, split_spans
from verifier.kv import PagedKV, padded_tables


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar context length that share one padded call.

    rows [B]: their places in the batch, None when that is all of it in order. seen [B, 2 KV, context_len + w, hd]: keys,
    then values. mask [B, 1, 1, context_len + w] hides padding; None when there is none.
    """

    rows: Tensor | None
    seen: Tensor
    context_len: int
    mask: Tensor | None


class ChainAttention:
    def __init__(self, pool: PagedKV, starts: Sequence[BlockStart], width: int, *, num_heads: int) -> None:
        self.pool, self.width, self.num_heads = pool, width, num_heads
        spans = [Span(i, 1, s.num_context, s.context_blocks(pool.block_size)) for i, s in enumerate(starts)]
        self.buckets = [self._bucket(chosen, len(spans)) for chosen in split_spans(spans, pool.block_size)]

    def _bucket(self, spans: Sequence[Span], num_requests: int) -> Bucket:
        tensors, device = self.pool.pool, self.pool.pool.device
        lengths = np.array([s.start for s in spans]) - 1
        longest = int(lengths.max())
        tables = padded_tables([s.block_ids for s in spans], -(-(longest + 1) // self.pool.block_size))
        blocks = torch.from_numpy(tables.ravel()).to(device)
        gathered = tensors[0].index_select(0, blocks).view(len(spans), -1, *tensors.shape[-2:])
        seen = tensors.new_empty(len(spans), tensors.shape[-2], longest + self.width, tensors.shape[-1])
        seen[:, :, :longest] = gathered[:, 1 : longest + 1].transpose(1, 2)
        mask = None
        if int(lengths.min()) < longest:
            columns = np.arange(longest + self.width)
            hidden = torch.from_numpy((columns < longest) & (columns >= lengths[:, None]))
            mask = torch.zeros(hidden.shape, dtype=tensors.dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None, :].to(device)
        order = [s.first_row for s in spans]
        rows = None if order == list(range(num_requests)) else torch.tensor(order, device=device)
        return Bucket(rows, seen, longest, mask)

    def __call__(self, qkv: Tensor, step: int) -> Tensor:
        """qkv [R, H + 2 KV, hd], rotated, of the tokens at `step` -> [R, H * hd]."""
        if self.buckets[0].rows is None:
            return self._attend(qkv, step, self.buckets[0])
        out = qkv.new_empty(len(qkv), self.num_heads * qkv.shape[-1])
        for bucket in self.buckets:
            assert bucket.rows is not None
            out.index_copy_(0, bucket.rows, self._attend(qkv.index_select(0, bucket.rows), step, bucket))
        return out

    def _attend(self, qkv: Tensor, step: int, bucket: Bucket) -> Tensor:
        """[B, H + 2 KV, hd] -> [B, H * hd]. Heads that share a key head become query rows of it: K and V are not repeated."""
        stop, num_kv_heads = bucket.context_len + step + 1, self.pool.num_kv_heads
        bucket.seen[:, :, stop - 1] = qkv[:, self.num_heads :]
        queries = qkv[:, : self.num_heads].reshape(len(qkv), num_kv_heads, -1, qkv.shape[-1])
        attended = F.scaled_dot_product_attention(
            queries,
            bucket.seen[:, :num_kv_heads, :stop],
            bucket.seen[:, num_kv_heads:, :stop],
            attn_mask=None if bucket.mask is None else bucket.mask[..., :stop],
        )
        return attended.reshape(len(qkv), -1)
