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

from drafter.train import native

# Rows of one chunk on a CPU: 256 x 6,000 float32 stay in a last-level cache. A GPU wants larger products.
_CHUNK_ROWS = 256
_CHUNK_ROWS_GPU = 2048


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Weights of the loss terms and the decay of slot weights exp(-(k - 1) / decay); DeepSpec's values.

    kl: weight of the cross-entropy against the target's whole law instead of the token it wrote; a denser signal for
    short trainings, off in DeepSpec. detach_confidence: that term trains its own head only; in DeepSpec it also reaches the
    backbone and W1.
    """

    ce: float = 0.1
    tv: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = False


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


@dataclass(frozen=True, slots=True)
class TargetLaws:
    """The target's laws on the draft vocabulary. logits: [T, Vd] in the head's dtype. lse: [T] float32 log denominators over
    the whole vocabulary."""

    logits: Tensor
    lse: Tensor

    def probabilities(self, rows: Tensor) -> Tensor:
        """rows [n] -> p [n, Vd] float32."""
        chosen = self.logits.index_select(0, rows).float()
        return chosen.sub_(self.lse.index_select(0, rows).unsqueeze(1)).exp_()


def target_laws(last: Tensor, lse: Tensor, lm_head: Tensor) -> TargetLaws:
    """last [T, d] after the target's final norm, lse [T] of the whole vocabulary, lm_head [Vd, d]."""
    return TargetLaws(F.linear(last.to(lm_head.dtype), lm_head), lse.float())


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
        laws: TargetLaws,
        slots: Slots,
        config: LossConfig,
        denominator: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows = hidden if mixed is None else torch.cat((hidden, mixed.to(hidden.dtype)), dim=-1)
        matrix = lm_head if w2 is None else torch.cat((lm_head, w2.to(lm_head.dtype)), dim=-1)
        grad_rows, grad_w2 = torch.empty_like(rows), None if w2 is None else torch.zeros_like(w2)
        each = rows.new_empty(len(rows), 3, dtype=torch.float32)
        best = rows.new_empty(len(rows), dtype=torch.int64)
        weights = slots.weights / denominator
        terms_of = _native_terms if native.usable(rows) else _chunk_terms
        chunk_rows = _CHUNK_ROWS if rows.device.type == "cpu" else _CHUNK_ROWS_GPU
        buffer = rows.new_empty(min(chunk_rows, len(rows)), len(matrix))
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = torch.mm(rows[part], matrix.t(), out=buffer[: len(rows[part])])
            chunk = _Chunk(logits, laws, slots.law_rows[part], slots.label_columns[part], weights[part])
            each[part], best[part], grad = terms_of(chunk, config)
            torch.mm(grad, matrix, out=grad_rows[part])
            if grad_w2 is not None:
                grad_w2 += grad.t() @ rows[part, hidden.shape[1] :]
        sums, overlap = weights @ each, 1 - 0.5 * each[:, 1]
        ctx.grads = grad_rows[:, : hidden.shape[1]], grad_rows[:, hidden.shape[1] :], grad_w2
        ctx.has_markov = mixed is not None
        ctx.mark_non_differentiable(overlap, best)
        total = config.ce * sums[0] + config.tv * sums[1] + config.kl * sums[2]
        return total, sums[0], sums[1], sums[2], overlap, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, mixed, w2 = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.grads)
        return hidden, mixed if ctx.has_markov else None, w2, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """n slots. logits: [n, Vd], free to be overwritten. law_rows, labels, weights: [n], weights divided by their sum."""

    logits: Tensor
    laws: TargetLaws
    law_rows: Tensor
    labels: Tensor
    weights: Tensor


def _native_terms(chunk: _Chunk, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """As `_chunk_terms`, in one pass over each row."""
    terms, best = native.vocabulary_terms(
        chunk.logits,
        chunk.laws.logits,
        chunk.laws.lse,
        chunk.law_rows,
        chunk.labels,
        chunk.weights,
        (config.ce, config.tv, config.kl),
    )
    return terms, best, chunk.logits


def _chunk_terms(chunk: _Chunk, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """ce, tv, kl of each slot [n, 3], column of the largest logit [n], gradient of the loss in the logits [n, Vd].

    d/dz sum_v |q_v - p_v| = q (s - sum_v q_v s_v) with s the sign of q - p; d/dz of -log q(x*) = q - onehot(x*);
    d/dz of -sum p log q = q sum(p) - p.
    """
    logits, p, labels = chunk.logits.float(), chunk.laws.probabilities(chunk.law_rows), chunk.labels
    best = logits.argmax(-1)
    lse = logits.logsumexp(-1)
    inside = p.sum(-1)
    known = labels >= 0
    columns = labels.clamp_min(0).unsqueeze(1)
    ce = (lse - logits.gather(1, columns).squeeze(1)) * known
    kl = inside * lse - torch.linalg.vecdot(p, logits)
    q = logits.sub(lse.unsqueeze(1)).exp_()
    difference = q - p
    sign = difference.sign()
    tv = torch.linalg.vecdot(difference, sign) + (1 - inside).clamp_min(0)
    mean_sign = torch.linalg.vecdot(q, sign)
    # q (tv (s - mean) + ce + kl inside) - kl p - ce onehot, in place
    shift = config.ce * known - config.tv * mean_sign + config.kl * inside
    grad = sign.mul_(config.tv).add_(shift.unsqueeze(1)).mul_(q)
    if config.kl:
        grad.sub_(p.mul_(config.kl))
    if config.ce:
        grad.scatter_add_(1, columns, (-config.ce * known.float()).unsqueeze(1))
    grad.mul_(chunk.weights.unsqueeze(1))
    return torch.stack((ce, tv, kl), dim=1), best, grad.to(chunk.logits.dtype)


def vocabulary_loss(
    hidden: Tensor,
    mixed: Tensor | None,
    w2: Tensor | None,
    *,
    lm_head: Tensor,
    laws: TargetLaws,
    slots: Slots,
    config: LossConfig,
    denominator: Tensor | None = None,
) -> tuple[Tensor, VocabularyTerms]:
    """Weighted mean over slots of ce, tv and kl terms (differentiable in hidden [N, d], mixed [N, r] and w2 [Vd, r]).

    mixed: what the Markov head multiplies W2 with; None without one. denominator: what the weighted sums are divided by,
    the sum of these slots' weights unless more batches belong to the same update.
    """
    if denominator is None:
        denominator = slots.weights.sum().clamp_min(1e-9)
    total, *rest = _VocabularyLoss.apply(hidden, mixed, w2, lm_head, laws, slots, config, denominator)
    return total, VocabularyTerms(*rest)


def confidence_loss(logits: Tensor, overlap: Tensor, weights: Tensor, denominator: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of the confidence logits [N] against the acceptance c* [N] (no gradient through c*)."""
    each = F.binary_cross_entropy_with_logits(logits, overlap.clamp(0, 1), reduction="none")
    return (weights * each).sum() / (weights.sum().clamp_min(1e-9) if denominator is None else denominator)
