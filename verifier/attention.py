"""Causal attention of one ragged step over the paged cache.

A step mixes prompt chunks, plain decodes and drafts of any length. Short extensions (up to SHORT rows) of similar context
length share one padded call; a long prompt chunk is a call of its own. Padding is masked, so no row ever sees another
request's context.

    flat rows of the step      [a0 a1 a2 | b0 | c0 c1]
    padded queries of a bucket [[a0 a1 a2], [b0 b0 b0], [c0 c1 c0]]   (padding repeats the request's first row)
    mask [R, 1, Q * G, L]      row q of a request at position p sees its context slots 0..p
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
from verifier.kv import PagedKV, padded_tables
from verifier.layers import Rotary
from verifier.native_step import AttentionStep, Rows

# Extensions of at most this many rows are padded together; longer ones (prompt chunks) are computed alone.
SHORT = 16
# A shorter context leaves a bucket when padding it would read this many rows in vain (a call costs about that much).
_SPLIT_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """One extension's place in the step: `num_rows` flat rows from `first_row`, at positions start.. of its request."""

    first_row: int
    num_rows: int
    start: int
    block_ids: IntArray

    @property
    def context_len(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one padded call: R requests, Q query rows each, context padded to whole blocks.

    query_rows [R * Q] flat rows (None: all rows of the step in order), blocks [R * n], mask [R, 1, Q * G, n * block_size],
    kept [rows] indexes of the real rows among R * Q and their flat rows. stale: gathered rows of the requests' last blocks, among
    R * n * block_size, that nobody has written since the block was another request's.
    """

    num_requests: int
    num_queries: int
    query_rows: Tensor | None
    blocks: Tensor
    mask: Tensor
    kept: Tensor
    flat_rows: Tensor
    stale: Tensor


def paged_attention(
    kv: PagedKV, rotary: Rotary, slots: Tensor, positions: Tensor, spans: Sequence[Span], *, num_heads: int
) -> AttentionStep | TorchAttention:
    """The attention of one step, by the native kernel where it applies. slots, positions [N] of the flat rows."""
    pool = kv.pool
    if native.usable(pool.dtype, pool.device, pool.shape[-1], num_heads // kv.num_kv_heads):
        num_blocks = -(-max(s.context_len for s in spans) // kv.block_size)
        return AttentionStep(
            pool=pool,
            rows=[Rows(s.first_row, s.num_rows, table) for table, s in enumerate(spans)],
            tables=padded_tables([s.block_ids for s in spans], num_blocks),
            limits=positions.numpy() + 1,
            positions=positions,
            slots=slots,
            cos_sin=rotary.tables,
            num_heads=num_heads,
            num_kv_heads=kv.num_kv_heads,
            head_dim=pool.shape[-1],
            block_size=kv.block_size,
        )
    return TorchAttention(kv, slots, spans, num_heads=num_heads, dtype=pool.dtype)


class TorchAttention:
    """`attend(layer, qkv)` for one step by torch operators, on any device and dtype. Built once per step."""

    rotates = False

    def __init__(
        self, kv: PagedKV, slots: Tensor, spans: Sequence[Span], *, num_heads: int, dtype: torch.dtype
    ) -> None:
        self.kv, self.slots = kv, slots
        self.num_heads = num_heads
        self.group = num_heads // kv.num_kv_heads
        self.buckets = [
            self._bucket(chosen, len(slots), dtype, slots.device) for chosen in split_spans(spans, kv.block_size)
        ]

    def _bucket(self, spans: Sequence[Span], num_rows: int, dtype: torch.dtype, device: torch.device) -> Bucket:
        size = self.kv.block_size
        num_queries = max(s.num_rows for s in spans)
        num_blocks = -(-max(s.context_len for s in spans) // size)
        first = np.array([s.first_row for s in spans])[:, None]
        counts = np.array([s.num_rows for s in spans])[:, None]
        starts = np.array([s.start for s in spans])[:, None]
        offsets = np.arange(num_queries)[None, :]
        real = offsets < counts
        rows = np.where(real, first + offsets, first)
        positions = np.where(real, starts + offsets, starts)
        visible = np.arange(num_blocks * size)[None, None, :] <= positions[:, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
        whole_step = bool(real.all()) and rows.size == num_rows and bool((rows.ravel() == np.arange(num_rows)).all())
        tables = padded_tables([s.block_ids[: -(-s.context_len // size)] for s in spans], num_blocks)
        ends = [(r * num_blocks * size, s.context_len) for r, s in enumerate(spans)]
        stale = np.concatenate([np.arange(first + n, first + -(-n // size) * size) for first, n in ends])
        return Bucket(
            num_requests=len(spans),
            num_queries=num_queries,
            query_rows=None if whole_step else torch.from_numpy(rows.ravel()).to(device),
            blocks=torch.from_numpy(tables.ravel()).to(device),
            mask=mask.repeat_interleave(self.group, dim=1).unsqueeze(1).to(device),
            kept=torch.from_numpy(np.flatnonzero(real.ravel())).to(device),
            flat_rows=torch.from_numpy(rows[real]).to(device),
            stale=torch.from_numpy(stale).to(device),
        )

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, H + 2 KV, hd], rotated -> [N, H * hd]."""
        self.kv.write(layer, self.slots, qkv[:, self.num_heads :])
        queries = qkv[:, : self.num_heads]
        if len(self.buckets) == 1 and self.buckets[0].query_rows is None:
            return self._attend(layer, queries, self.buckets[0])
        out = qkv.new_empty(qkv.shape[0], self.num_heads * qkv.shape[-1])
        for bucket in self.buckets:
            rows = queries if bucket.query_rows is None else queries.index_select(0, bucket.query_rows)
            attended = self._attend(layer, rows, bucket)
            out.index_copy_(0, bucket.flat_rows, attended.index_select(0, bucket.kept))
        return out

    def _attend(self, layer: int, queries: Tensor, bucket: Bucket) -> Tensor:
        """queries [R * Q, H, hd] -> [R * Q, H * hd]. Heads that share a key head become query rows of it: no copies of K, V."""
        r, q, g, hd = bucket.num_requests, bucket.num_queries, self.group, queries.shape[-1]
        keys, values = self.kv.gather(layer, bucket.blocks, r, bucket.stale)
        folded = queries.reshape(r, q, -1, g, hd).transpose(1, 2).reshape(r, -1, q * g, hd)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bucket.mask)
        return attended.view(r, -1, q, g, hd).transpose(1, 2).reshape(r * q, -1)


def split_spans(spans: Sequence[Span], block_size: int) -> list[list[Span]]:
    """Long spans alone; short ones by falling context length, a new bucket where padding would read too much in vain."""
    buckets = [[span] for span in spans if span.num_rows > SHORT]
    short = [span for span in spans if span.num_rows <= SHORT]
    if not short:
        return buckets
    longest, shortest = max(s.context_len for s in short), min(s.context_len for s in short)
    if (longest - shortest) * len(short) <= _SPLIT_ROWS:
        return [*buckets, short]
    current: list[Span] = []
    wasted = 0
    for span in sorted(short, key=lambda s: -s.context_len):
        wasted += current[0].context_len - span.context_len if current else 0
        if current and wasted > _SPLIT_ROWS:
            buckets.append(current)
            current, wasted = [], 0
        current.append(span)
    return [*buckets, current]
