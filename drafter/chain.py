"""Drafters that are run once per drafted token: one decoder layer fed the newest token and a state of width d (Eagle3, MTP).

    row at position p of a request      token x_p with the state before it, at RoPE position p - 1
    state before x_p                    the target's, made of its features at p - 1; while drafting, the layer's own output
    draft k after the anchor x_a        from the output of the row at a + k

The draft KV cache holds the rows of committed tokens, each at its token's slot of the shared block table, so that a row
depends on nothing after its slot and a cached prefix is right for whoever continues it. Position 0 has no state before it
and no row. Beside the KV rows stands the target's state at each slot (`states`), which the row after it needs; that is all
that is kept between calls. Rows of drafted tokens live for one proposal.

A row after one that was never captured is made with what the slot before it held. The request that wrote it begins behind it
(drafter/chain_attention.py). One that later finds its block in the prefix cache, behind rows that were computed once more, reads
it as one of its context rows: a worse draft at most, since whatever is proposed is verified against the law it was drawn from.

Knows no vocabulary head and no sampling. What the input of the layer is, is the cell's business (drafter/eagle3.py,
drafter/mtp.py). One layer only: rows of several would need attention while committed tokens are absorbed.

Shapes: n committed rows, R requests, d hidden, H query heads, KV key heads, hd head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafter.block_attention import BlockStart
from drafter.chain_attention import ChainAttention
from drafter.checkpoint import Checkpoint
from drafter.eagle3 import Eagle3Cell
from drafter.mtp import MtpCell
from verifier.features import CommittedFeatures, merged
from verifier.kv import PagedKV, finite_in_place
from verifier.layers import Linear, Rotary, rms_norm, split_heads_norm
from verifier.model import DecoderLayer


class Cell(Protocol):
    """How a drafter reads the target and makes its layer's input."""

    def state(self, features: Tensor) -> Tensor:
        """Captured features [n, m d] -> the states that the next tokens are paired with [n, d]."""
        ...

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Token embeddings and the states before them, each [n, d] -> input of the projections [n, d or 2 d], residual
        stream [n, d]."""
        ...


class Chain:
    """max_len: positions that the rotary tables cover; drafted tokens must end before it."""

    def __init__(
        self, checkpoint: Checkpoint, pool: PagedKV, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        arch, weights = checkpoint.arch, checkpoint.tensors
        decoder = arch.decoder
        self.pool, self.dtype, self.device, self.max_len = pool, dtype, device, max_len
        self.eps, self.num_heads, self.num_kv_heads = decoder.rms_norm_eps, decoder.num_heads, decoder.num_kv_heads
        self.head_dim = decoder.head_dim
        self.embed_tokens, self.norm = weights["embed_tokens.weight"], weights["norm.weight"]
        self.cell: Cell = Eagle3Cell(checkpoint) if arch.design == "eagle3" else MtpCell(checkpoint)
        self.layer = DecoderLayer(decoder, weights, "layers.0")
        names = [f"layers.0.self_attn.{p}_proj" for p in "kv"]
        bias = torch.cat([weights[f"{name}.bias"] for name in names]) if decoder.qkv_bias else None
        self.context_kv = Linear(torch.cat([weights[f"{name}.weight"] for name in names]), bias)
        self.rotary = Rotary(decoder, max_len, dtype, device)
        self.states = torch.zeros(pool.num_blocks * pool.block_size, decoder.hidden_size, dtype=dtype, device=device)

    def absorb(self, messages: Sequence[CommittedFeatures]) -> None:
        """Writes states and rows of newly committed tokens; of two rows for a slot the later stays."""
        for committed in merged(messages) if self.device.type == "cpu" else messages:
            self._write(committed)

    def _write(self, committed: CommittedFeatures) -> None:
        assert committed.token_ids is not None and committed.previous_slots is not None
        slots = committed.slots.to(self.device)
        states = finite_in_place(self.cell.state(committed.features.to(self.device, self.dtype)))
        self.states.index_copy_(0, slots, states)
        states = self.states.index_select(0, committed.previous_slots.to(self.device))
        # the row of position 0 is no row: it is written with what block 0 holds and never read
        positions = (committed.positions.to(self.device) - 1).clamp_min(0)
        rows = self._context_rows(committed.token_ids.to(self.device), states, positions)
        self.pool.write(0, slots, finite_in_place(rows))

    def _context_rows(self, ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """Tokens [n] and the states before them [n, d] -> rotated keys, then values [n, 2 KV, hd]."""
        entered, _ = self.cell.enter(self.embed_tokens.index_select(0, ids), states)
        rows = self.context_kv(entered).view(-1, 2 * self.num_kv_heads, self.head_dim)
        if self.layer.qk_norm is not None:
            keys = rows[:, : self.num_kv_heads]
            keys.copy_(split_heads_norm(keys, self.layer.qk_norm[self.num_heads :], self.eps))
        # rows past the tables belong to requests that no longer draft: they are written, never read
        return self.rotary.rotate(rows, self.rotary.at(positions.clamp_max(self.max_len - 1), self.num_kv_heads))

    def begin(self, starts: Sequence[BlockStart], width: int) -> Walk:
        """A proposal of up to `width` tokens for requests that have a context."""
        return Walk(self, starts, width)


class Walk:
    """One proposal: `step` is called with the anchors, then with the tokens drawn from each step's output."""

    def __init__(self, chain: Chain, starts: Sequence[BlockStart], width: int) -> None:
        self.chain, self.attention = chain, ChainAttention(chain.pool, starts, width, num_heads=chain.num_heads)
        size = chain.pool.block_size
        before = [int(s.block_ids[(s.start - 1) // size]) * size + (s.start - 1) % size for s in starts]
        self.state = chain.states.index_select(0, torch.tensor(before, device=chain.device))
        self._first = torch.tensor([s.start - 1 for s in starts], device=chain.device)
        self._num_steps = 0

    def step(self, token_ids: Tensor) -> Tensor:
        """Newest tokens [R] -> hidden states after the last norm [R, d], from which the token after them is drawn."""
        chain, layer = self.chain, self.chain.layer
        entered, residual = chain.cell.enter(chain.embed_tokens.index_select(0, token_ids), self.state)
        qkv = layer.qkv(entered).view(-1, layer.num_heads, layer.head_dim)
        if layer.qk_norm is not None:
            normed = qkv[:, : layer.num_normed]
            normed.copy_(split_heads_norm(normed, layer.qk_norm, layer.eps))
        qkv = chain.rotary.rotate(qkv, chain.rotary.at(self._first + self._num_steps))
        self.state = layer.finish(residual, self.attention(qkv, self._num_steps))
        self._num_steps += 1
        return rms_norm(self.state, chain.norm, chain.eps)
