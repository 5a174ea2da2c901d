"""The heads of a trainable drafter, under the names of a checkpoint: Markov (vanilla, gated, RNN) and confidence.

Formulas are those of drafter/heads.py, which serves them; a test holds the two together. Must not know losses.

Shapes: N block slots, M blocks, d hidden, r Markov rank, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Weight(nn.Module):
    """A linear (out, in) or a norm (width) without a forward of its own: it gives the parameters their names."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


# What the RNN cell's tanh takes in at first, root mean square. The smaller, the truer to the head it begins as, and the larger
# beside it a step of the optimiser: at a quarter of this a grown head lost 7 % of its first slot's acceptance.
_USUAL_TANH = 0.3


@dataclass(frozen=True, slots=True)
class HeadTerms:
    """embeddings: W1 rows of the tokens before each slot [N, r], which the confidence head reads. mixed: what W2 multiplies
    [N, r]. w2: [Vd, r]. All None without a Markov head."""

    embeddings: Tensor | None = None
    mixed: Tensor | None = None
    w2: Tensor | None = None


class MarkovHead(nn.Module):
    def __init__(self, kind: str, num_previous: int, num_drafted: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1, self.markov_w2 = Weight(num_previous, rank), Weight(num_drafted, rank)
        if kind == "gated":
            self.gate_proj = Weight(rank, hidden_size + rank, bias=True)
        elif kind == "rnn":
            self.joint_proj = Weight(3 * rank, 2 * rank + hidden_size, bias=True)

    def forward(self, rows: Tensor, hidden: Tensor, lengths: Sequence[int]) -> HeadTerms:
        """rows: [N] of W1. hidden: [N, d]. lengths: slots of each of the M blocks, in order; they sum to N."""
        embeddings = F.embedding(rows, self.markov_w1.weight)
        mixed = embeddings
        if self.kind == "gated":
            mixed = self._gate(embeddings, hidden) * embeddings
        elif self.kind == "rnn":
            mixed = self._recur(embeddings, hidden, lengths)
        return HeadTerms(embeddings, mixed, self.markov_w2.weight)

    @torch.no_grad()
    def begin_as_vanilla(self) -> None:
        """Sets the cell, and the size of W2 to it, so that the head's biases are those of the vanilla head with W1 and W2 as
        they are: exactly for the gated one, but for the bend of its tanh for the RNN, whose state then still has no say."""
        if self.kind == "gated":
            self.gate_proj.weight.zero_()
            nn.init.zeros_(self.gate_proj.get_parameter("bias"))
            self.markov_w2.weight.mul_(2.0)  # sigmoid(0) = 1/2
        elif self.kind == "rnn":
            slope = _USUAL_TANH / float(self.markov_w1.weight.square().mean().sqrt().clamp_min(1e-3))
            output, rank = slice(2 * self.rank, None), self.rank
            self.joint_proj.weight[output].zero_()
            self.joint_proj.weight[output, rank : 2 * rank].fill_diagonal_(slope)
            self.joint_proj.get_parameter("bias")[output].zero_()
            self.markov_w2.weight.div_(slope)

    def _gate(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """sigma(G [h; e] + b)"""
        on_hidden, on_embedding = self.gate_proj.weight.split((hidden.shape[1], self.rank), dim=1)
        terms = linear(hidden, on_hidden, self.gate_proj.bias).float()
        return (terms + F.linear(embeddings, on_embedding)).sigmoid()

    def _recur(self, embeddings: Tensor, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """gate, candidate, output = J [s; e; h] + b; u = tanh(output), from the old state; s' = lerp(tanh(candidate), s, gate).

        All blocks take step k at once; the steps of shorter blocks past their end are computed and left out.
        """
        on_rest, on_hidden = self.joint_proj.weight.split((2 * self.rank, hidden.shape[1]), dim=1)
        on_state, on_embedding = on_rest.split(self.rank, dim=1)
        terms = linear(hidden, on_hidden, self.joint_proj.bias).float() + F.linear(embeddings, on_embedding)
        length = torch.tensor(lengths, device=hidden.device)
        steps = torch.arange(max(lengths), device=hidden.device)
        slots = (length.cumsum(0) - length).unsqueeze(1) + torch.minimum(steps, length.unsqueeze(1) - 1)
        state = terms.new_zeros(len(lengths), self.rank)
        outputs = []
        for k in range(max(lengths)):
            joint = terms.index_select(0, slots[:, k]) + F.linear(state, on_state)
            gate, candidate, output = joint.split(self.rank, dim=1)
            outputs.append(output.tanh())
            state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
        width = max(lengths)
        inside = torch.cat([torch.arange(block * width, block * width + n) for block, n in enumerate(lengths)])
        return torch.stack(outputs, dim=1).flatten(0, 1).index_select(0, inside.to(hidden.device))


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """hidden [N, d], and W1 rows of the previous tokens [N, r] where the head reads them -> logits [N] float32."""
        parts = [hidden.float()] + ([embeddings.float()] if embeddings is not None else [])
        return F.linear(torch.cat(parts, dim=-1), self.proj.weight, self.proj.bias).squeeze(-1)
