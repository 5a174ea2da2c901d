"""What turns a block's hidden states into dependent tokens: the Markov heads, and the confidence head beside them.

A Markov head adds to the base logits of slot k a bias that depends on the token before it: W2 u_k, where u_k [r] is made
of that token's embedding W1[x_{k-1}] by the head's cell. The walk computes in float32, whatever the backbone computes in.

Shapes: R requests, w slots, d hidden, r Markov rank, K candidates (or Vd draft tokens) per slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.checkpoint import Checkpoint
from verifier.layers import Linear


class Cell(Protocol):
    """Makes u_k. `slot_terms` is what the hidden states contribute, computed for all slots at once before the walk."""

    def slot_terms(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, w, d] -> [R, w, ...]."""
        ...

    def step(self, embedding: Tensor, terms: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Embedding of the previous token [R, r], one slot's terms, the state left by the slot before (None at first)
        -> u [R, r] and the new state."""
        ...


class VanillaCell:
    """u = e."""

    def slot_terms(self, hidden: Tensor) -> Tensor | None:
        return None

    def step(self, embedding: Tensor, terms: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return embedding, None


class GatedCell:
    """u = sigma(G [h; e] + b) * e."""

    def __init__(self, weights: Mapping[str, Tensor], rank: int) -> None:
        weight = weights["markov_head.gate_proj.weight"]
        self._on_hidden = Linear(weight[:, :-rank], weights["markov_head.gate_proj.bias"])
        self._on_embedding = weight[:, -rank:].float().contiguous()

    def slot_terms(self, hidden: Tensor) -> Tensor | None:
        return _per_slot(self._on_hidden, hidden)

    def step(self, embedding: Tensor, terms: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert terms is not None
        gate = torch.addmm(terms, embedding, self._on_embedding.t()).sigmoid_()
        return gate.mul_(embedding), None


class RecurrentCell:
    """z = [s; e; h]; gate, candidate, output = J z + b; u = tanh(output).

    s' = sigma(gate) s + (1 - sigma(gate)) tanh(candidate), and 0 before the first slot. The output is of the old state.
    """

    def __init__(self, weights: Mapping[str, Tensor], rank: int) -> None:
        weight = weights["markov_head.joint_proj.weight"]
        self._rank = rank
        self._on_hidden = Linear(weight[:, 2 * rank :], weights["markov_head.joint_proj.bias"])
        self._on_rest = weight[:, : 2 * rank].float().contiguous()

    def slot_terms(self, hidden: Tensor) -> Tensor | None:
        return _per_slot(self._on_hidden, hidden)

    def step(self, embedding: Tensor, terms: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert terms is not None
        if state is None:
            state = torch.zeros_like(embedding)
        joint = torch.addmm(terms, torch.cat((state, embedding), dim=-1), self._on_rest.t())
        gate, candidate, output = joint.split(self._rank, dim=-1)
        return output.tanh(), torch.lerp(candidate.tanh(), state, gate.sigmoid())


def _per_slot(linear: Linear, hidden: Tensor) -> Tensor:
    return linear(hidden.flatten(0, 1)).float().view(*hidden.shape[:2], -1)


class MarkovHead:
    """W1, W2 and the cell between them. Tokens come in as target ids; candidates as columns of the draft vocabulary."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        weights, rank = checkpoint.tensors, checkpoint.arch.markov_rank
        self.w1 = weights["markov_head.markov_w1.weight"]
        self.w2 = weights["markov_head.markov_w2.weight"]
        self.row_of = _embedding_rows(checkpoint)
        cells: dict[str, Cell] = {"vanilla": VanillaCell()}
        if checkpoint.arch.head_type == "gated":
            cells["gated"] = GatedCell(weights, rank)
        elif checkpoint.arch.head_type == "rnn":
            cells["rnn"] = RecurrentCell(weights, rank)
        self.cell = cells[checkpoint.arch.head_type]

    @cached_property
    def score_all(self) -> Linear:
        """u [.., r] -> bias of every column of the draft vocabulary."""
        return Linear(self.w2)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target ids [R] -> W1 rows [R, r] in float32."""
        rows = token_ids if self.row_of is None else self.row_of.index_select(0, token_ids)
        return self.w1.index_select(0, rows).float()

    def candidate_rows(self, columns: Tensor) -> Tensor:
        """columns [R, w, K] -> W2 rows [R, w, K, r] in float32."""
        return self.w2.index_select(0, columns.flatten()).float().view(*columns.shape, -1)

    def bias(self, mixed: Tensor, rows: Tensor | None) -> Tensor:
        """u [R, r] -> bias of a slot's candidates [R, K] (rows [R, K, r]) or of the whole draft vocabulary (rows None)."""
        if rows is None:
            return self.score_all(mixed.to(self.w1.dtype)).float()
        # a row times a matrix: as matrix times column the same product is ten times slower on CPU
        return torch.bmm(mixed.unsqueeze(1), rows.transpose(1, 2)).squeeze(1)


def _embedding_rows(checkpoint: Checkpoint) -> Tensor | None:
    """[V] W1 row of each target id where W1 has Vd + 1 rows; None where a token's row is its id."""
    ids, num_ids = checkpoint.draft_vocab_ids, checkpoint.arch.decoder.vocab_size
    if ids is None or len(checkpoint.tensors["markov_head.markov_w1.weight"]) == num_ids:
        return None
    rows = ids.new_full((num_ids,), len(ids))
    rows[ids] = torch.arange(len(ids), device=ids.device)
    return rows


class ConfidenceHead:
    """Logit of P(token k accepted | those before it accepted), from h_k and the token before k, never from token k."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        weight = checkpoint.tensors["confidence_head.proj.weight"].float()
        d = checkpoint.arch.decoder.hidden_size
        self._bias = checkpoint.tensors["confidence_head.proj.bias"].float()
        self._on_hidden = weight[:, :d].contiguous()
        self._on_embedding = weight[0, d:].contiguous() if checkpoint.arch.confidence_with_markov else None

    @property
    def needs_embeddings(self) -> bool:
        return self._on_embedding is not None

    def logits(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """hidden [R, w, d], W1 rows of the tokens before each slot [R, w, r] -> [R, w] float32."""
        scores = F.linear(hidden.float(), self._on_hidden, self._bias).squeeze(-1)
        if self._on_embedding is None:
            return scores
        assert embeddings is not None
        return scores + embeddings @ self._on_embedding


def build_heads(checkpoint: Checkpoint) -> tuple[MarkovHead | None, ConfidenceHead | None]:
    markov = MarkovHead(checkpoint) if checkpoint.arch.markov_rank else None
    return markov, ConfidenceHead(checkpoint) if checkpoint.arch.has_confidence else None
