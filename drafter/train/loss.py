"""The losses of DSpark over packed block slots, with the vocabulary seen in chunks and never kept.

Owns cross-entropy, total variation and confidence loss, and their gradients through the vocabulary, written out so that
no float32 tensor of vocabulary width outlives its chunk. Must not know networks or data.

Symbols: p the target's law (temperature 1), q the drafter's; N slots, T target rows, Vd draft vocabulary, d hidden, r rank.
With a reduced vocabulary p keeps its true values on the Vd tokens, so its sum is below 1; the mass outside counts in
the total variation as loss that cannot be removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of one chunk: 256 x 6,000 float32 stay in a last-level cache.
_CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Weights of the loss terms and the decay of slot weights exp(-(k - 1) / decay); DeepSpec's values.

    kl: weight of the cross-entropy against the target's whole law instead of the token it wrote; a denser signal for
    short trainings, off in DeepSpec.
    """

    ce: float = 0.1
    tv: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, slots=True)
class Slots:
    """What the N slots are to predict.

    law_rows: [N] row of `laws` that is the target's law of this slot. label_columns: [N] draft-vocabulary column of the
    token that the target wrote, -1 where it lies outside. weights: [N] float32, 0 for slots past the answer's end.
    """

    law_rows: Tensor
    label_columns: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class VocabularyTerms:
    """ce, tv, kl: weighted means. overlap: [N] sum of min(p, q), the acceptance c*. best: [N] column of q's maximum."""

    ce: Tensor
    tv: Tensor
    kl: Tensor
    overlap: Tensor
    best: Tensor


def target_laws(last: Tensor, lse: Tensor, lm_head: Tensor) -> Tensor:
    """last [T, d], lse [T] of the whole vocabulary, lm_head [Vd, d] -> p on the draft vocabulary [T, Vd] float32."""
    return F.linear(last.to(lm_head.dtype), lm_head).float().sub_(lse.unsqueeze(1)).exp_()


def slot_weights(length: int, decay: float) -> Tensor:
    """exp(-(k - 1) / decay) for k = 1..length."""
    return torch.exp(-torch.arange(length, dtype=torch.float32) / decay)


class _VocabularyLoss(torch.autograd.Function):
    """Loss over the vocabulary of logits [h; u] [W; W2]^T; its gradients are computed chunk by chunk in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        mixed: Tensor | None,
        w2: Tensor | None,
        lm_head: Tensor,
        laws: Tensor,
        slots: Slots,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows = hidden if mixed is None else torch.cat((hidden, mixed.to(hidden.dtype)), dim=-1)
        matrix = lm_head if w2 is None else torch.cat((lm_head, w2.to(lm_head.dtype)), dim=-1)
        grad_rows, grad_w2 = torch.empty_like(rows), None if w2 is None else torch.zeros_like(w2)
        sums = torch.zeros(3)
        overlap, best = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
        weights = slots.weights / slots.weights.sum().clamp_min(1e-9)
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            p = laws.index_select(0, slots.law_rows[part])
            logits = F.linear(rows[part], matrix).float()
            chunk = _chunk_terms(logits, p, slots.label_columns[part], weights[part], config)
            sums += chunk.sums
            overlap[part], best[part] = chunk.overlap, chunk.best
            grad = chunk.grad_logits.to(rows.dtype)
            grad_rows[part] = grad @ matrix
            if grad_w2 is not None:
                grad_w2 += grad.t() @ rows[part, hidden.shape[1] :]
        ctx.grads = grad_rows[:, : hidden.shape[1]], grad_rows[:, hidden.shape[1] :], grad_w2
        ctx.has_markov = mixed is not None
        ctx.mark_non_differentiable(overlap, best)
        total = config.ce * sums[0] + config.tv * sums[1] + config.kl * sums[2]
        return total, sums[0], sums[1], sums[2], overlap, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, mixed, w2 = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.grads)
        return hidden, mixed if ctx.has_markov else None, w2, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    sums: Tensor
    grad_logits: Tensor
    overlap: Tensor
    best: Tensor


def _chunk_terms(logits: Tensor, p: Tensor, labels: Tensor, weights: Tensor, config: LossConfig) -> _Chunk:
    """logits, p [n, Vd] float32; both are overwritten. weights [n] already divided by their sum.

    d/dz sum_v |q_v - p_v| = q (s - sum_v q_v s_v) with s the sign of q - p; d/dz of -log q(x*) = q - onehot(x*);
    d/dz of -sum p log q = q sum(p) - p.
    """
    best = logits.argmax(-1)
    lse = logits.logsumexp(-1)
    inside = p.sum(-1)
    known = labels >= 0
    columns = labels.clamp_min(0).unsqueeze(1)
    ce = (lse - logits.gather(1, columns).squeeze(1)) * known
    kl = inside * lse - torch.linalg.vecdot(p, logits)
    q = logits.sub_(lse.unsqueeze(1)).exp_()
    difference = q - p
    sign = difference.sign()
    inner = torch.linalg.vecdot(difference, sign)
    tv = inner + (1 - inside).clamp_min(0)
    mean_sign = torch.linalg.vecdot(q, sign)
    # q (tv (s - mean) + ce + kl inside) - kl p - ce onehot, in place
    shift = config.ce * known - config.tv * mean_sign + config.kl * inside
    grad = sign.mul_(config.tv).add_(shift.unsqueeze(1)).mul_(q)
    if config.kl:
        grad.sub_(p.mul_(config.kl))
    if config.ce:
        grad.scatter_add_(1, columns, (-config.ce * known.float()).unsqueeze(1))
    grad.mul_(weights.unsqueeze(1))
    sums = torch.stack([(weights * ce).sum(), (weights * tv).sum(), (weights * kl).sum()])
    return _Chunk(sums, grad, 1 - 0.5 * tv, best)


def vocabulary_loss(
    hidden: Tensor,
    mixed: Tensor | None,
    w2: Tensor | None,
    *,
    lm_head: Tensor,
    laws: Tensor,
    slots: Slots,
    config: LossConfig,
) -> tuple[Tensor, VocabularyTerms]:
    """Weighted mean over slots of ce, tv and kl terms (differentiable in hidden [N, d], mixed [N, r] and w2 [Vd, r]).

    mixed: what the Markov head multiplies W2 with; None without one. laws: [T, Vd] from `target_laws`.
    """
    total, *rest = _VocabularyLoss.apply(hidden, mixed, w2, lm_head, laws, slots, config)
    return total, VocabularyTerms(*rest)


def confidence_loss(logits: Tensor, overlap: Tensor, weights: Tensor) -> Tensor:
    """Binary cross-entropy of the confidence logits [N] against the acceptance c* [N] (no gradient through c*)."""
    each = F.binary_cross_entropy_with_logits(logits, overlap.clamp(0, 1), reduction="none")
    return (weights * each).sum() / weights.sum().clamp_min(1e-9)
