"""Where the Markov head starts: the target's own bigram law on its answers, as a product of two thin matrices.

Without this the head starts at nothing and spends the first hundred thousand positions on what counting gives at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drafter.train.blocks import valid_anchors
from drafter.train.loss import target_laws
from drafter.train.states import States

# Answer rows that are read, pseudo-counts of the unigram law, smallest probability.
_ROWS, _PRIOR, _FLOOR = 40_000, 3.0, 1e-6


@torch.no_grad()
def bigram_factors(
    sequences: Iterable[States], head: Tensor, row_of: Tensor, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """head [Vd, d]; row_of [V]: W1 row of each target id, Vd for those outside. Returns W1 [Vd + 1, r] and W2 [Vd, r] with
    W1 W2^T near log p(next | previous), up to a constant per row."""
    sums, counts = _law_sums(sequences, head, row_of)
    unigram = sums.sum(0).clamp_min(_FLOOR)
    unigram /= unigram.sum()
    laws = (sums + _PRIOR * unigram) / (counts + _PRIOR).unsqueeze(1)
    logs = laws.clamp_min_(_FLOOR).log_()
    logs -= logs.mean(1, keepdim=True)
    # frequent tokens matter more: they weigh more in what the low rank keeps
    rows, columns = (counts + 1).sqrt(), (unigram + 1e-5).pow(0.25)
    weighted = logs.mul_(rows.unsqueeze(1)).mul_(columns)
    basis = _range(weighted, rank + 16, generator)
    left, singular, right = torch.linalg.svd(basis.t() @ weighted, full_matrices=False)
    scale = singular[:rank].sqrt()
    w1 = (basis @ left[:, :rank]) * scale / rows.unsqueeze(1)
    return w1, right[:rank].t() * scale / columns.unsqueeze(1)


def _law_sums(sequences: Iterable[States], head: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the target's laws after each previous token [Vd + 1, Vd], and how often each came [Vd + 1]."""
    size = head.shape[0]
    sums, counts, num_rows = torch.zeros(size + 1, size), torch.zeros(size + 1), 0
    for states in sequences:
        rows = valid_anchors(states)
        previous = row_of.index_select(0, states.ids[rows].long().to(row_of.device)).cpu()
        at = rows.to(states.last.device)
        laws = target_laws(states.last[at].to(head.device), states.lse[at].to(head.device), head)
        sums.index_add_(0, previous, laws.probabilities(torch.arange(len(rows), device=head.device)).cpu())
        counts.index_add_(0, previous, torch.ones(len(previous)))
        num_rows += len(previous)
        if num_rows >= _ROWS:
            break
    return sums, counts


def _range(matrix: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Orthonormal basis of the matrix's main directions by two power iterations; seeded, which torch.svd_lowrank is not."""
    basis = torch.linalg.qr(matrix @ torch.randn(matrix.shape[1], rank, generator=generator)).Q
    for _ in range(2):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ basis).Q).Q
    return basis
