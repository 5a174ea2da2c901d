"""From a block's hidden states and base logits to tokens, the law each was drawn from, and confidence. Pure.

The walk is sequential: the bias of slot k depends on the token drawn at slot k - 1. Over a small draft vocabulary the walk
scores every token and keeps the K best of the corrected logits; over a large one only the K best base logits of a slot are
scored. (For the demo drafter the second way costs an eighth of the accepted length: the token that the bias lifts to the top
is often not among the 64 best without it.) Either way the law sent along has K entries, is renormalised over them and is
exactly what the token was drawn from.

Shapes: R requests, w slots, d hidden, Vd draft vocabulary, K candidates (Vd when all are).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.heads import ConfidenceHead, MarkovHead
from verifier.sampling import SamplingTable, draw

# Draft vocabularies up to this size are scored whole: 7 slots x 6,000 tokens x rank 128 are 5 MFLOP a request.
SCORED_WHOLE = 16_384
# A row is cut into groups of this many columns: the K largest lie in the K groups with the largest maxima.
_GROUP = 16


@dataclass(frozen=True, slots=True)
class Proposal:
    """token_ids [R, w] target ids; q_ids, q_probs [R, w, K] float32, None when no request draws fresh noise; logits: of each
    slot [R, K], corrected, before the temperature, none from native_walk.py; confidence_logits [R, w] or None without a
    confidence head."""

    token_ids: Tensor
    q_ids: Tensor | None
    q_probs: Tensor | None
    logits: tuple[Tensor, ...]
    confidence_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """logits [R, w, K]: base logits, float32. columns [R, w, K] of the draft vocabulary; None: all of them, in order.
    token_ids [R, w, K]: target ids; None: the draft vocabulary is the target's and all are candidates."""

    logits: Tensor
    columns: Tensor | None
    token_ids: Tensor | None


def choose_candidates(base_logits: Tensor, vocabulary: Tensor | None, count: int) -> Candidates:
    """The `count` best columns of base logits [R, w, Vd] (0, or a small vocabulary: all). vocabulary [Vd]: target ids of the
    columns."""
    if scores_whole(base_logits.shape[-1], count):
        ids = None if vocabulary is None else vocabulary.expand_as(base_logits)
        return Candidates(base_logits.float(), None, ids)
    logits, columns = largest(base_logits.flatten(0, 1), count)
    shape = (*base_logits.shape[:2], count)
    logits, columns = logits.view(shape), columns.view(shape)
    return Candidates(logits, columns, columns if vocabulary is None else vocabulary[columns])


def scores_whole(num_columns: int, count: int) -> bool:
    """Every column of the draft vocabulary is a candidate."""
    return count <= 0 or num_columns <= max(count, SCORED_WHOLE)


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values (float32) and columns of the `count` largest of each row [B, V], in any order: topk in two short steps."""
    num_groups = rows.shape[-1] // _GROUP
    if num_groups <= count:
        top = rows.float().topk(count, dim=-1, sorted=False)
        return top.values, top.indices
    grouped = rows[:, : num_groups * _GROUP].view(len(rows), _GROUP, num_groups)
    groups = grouped.amax(dim=1).float().topk(count, dim=-1, sorted=False).indices
    # group g is the columns g, g + num_groups, ...: maxima over the outer dimension are taken in whole vectors
    steps = torch.arange(0, num_groups * _GROUP, num_groups, device=rows.device)
    columns = (groups.unsqueeze(-1) + steps).flatten(1)
    if num_groups * _GROUP < rows.shape[-1]:
        rest = torch.arange(num_groups * _GROUP, rows.shape[-1], device=rows.device)
        columns = torch.cat((columns, rest.expand(len(rows), -1)), dim=-1)
    top = rows.gather(-1, columns).float().topk(count, dim=-1, sorted=False)
    return top.values, columns.gather(-1, top.indices)


def propose(
    *,
    hidden: Tensor,
    candidates: Candidates,
    keep: int = 0,
    anchor_ids: Tensor,
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    table: SamplingTable,
    output_positions: Tensor,
    generator: torch.Generator | None,
) -> Proposal:
    """Draws w tokens per request, one slot after the other.

    hidden [R, w, d] after the last norm. anchor_ids [R]: the token before slot 0. output_positions [R, w]: the output
    position that each token would take, which keys the seeded noise. keep: entries of each law, 0 is one per candidate.
    """
    num_slots = candidates.logits.shape[1]
    terms = markov.cell.slot_terms(hidden) if markov else None
    rows = markov.candidate_rows(candidates.columns) if markov and candidates.columns is not None else None
    tokens: list[Tensor] = []
    laws: list[Tensor | None] = []
    law_ids: list[Tensor | None] = []
    corrected: list[Tensor] = []
    embeddings: list[Tensor] = []
    previous, state = anchor_ids, None
    for k in range(num_slots):
        logits = candidates.logits[:, k]
        if markov:
            embedding = markov.embed(previous)
            mixed, state = markov.cell.step(embedding, None if terms is None else terms[:, k], state)
            logits = logits + markov.bias(mixed, None if rows is None else rows[:, k])
            embeddings.append(embedding)
        ids = None if candidates.token_ids is None else candidates.token_ids[:, k]
        logits, ids = _kept(logits, ids, keep, table)
        previous, law = draw(logits, ids, table, output_positions[:, k], generator)
        tokens.append(previous)
        laws.append(law)
        law_ids.append(ids)
        corrected.append(logits)
    q_ids, q_probs = _sparse_laws(laws, law_ids)
    return Proposal(
        token_ids=torch.stack(tokens, dim=1),
        q_ids=q_ids,
        q_probs=q_probs,
        logits=tuple(corrected),
        confidence_logits=_confidence(confidence, hidden, embeddings),
    )


def propose_chain(
    *,
    step: Callable[[Tensor], Tensor],
    width: int,
    vocabulary: Tensor | None,
    keep: int = 0,
    anchor_ids: Tensor,
    table: SamplingTable,
    output_positions: Tensor,
    generator: torch.Generator | None,
) -> Proposal:
    """Draws w tokens per request with a drafter that is run once per token.

    step: newest tokens [R] -> logits [R, Vd] of the token after them; called with the anchors, then with what was drawn.
    The rest as in `propose`; there is no confidence.
    """
    tokens: list[Tensor] = []
    laws: list[Tensor | None] = []
    law_ids: list[Tensor | None] = []
    drawn_from: list[Tensor] = []
    previous = anchor_ids
    for k in range(width):
        candidates = choose_candidates(step(previous).unsqueeze(1), vocabulary, keep)
        ids = None if candidates.token_ids is None else candidates.token_ids[:, 0]
        logits, ids = _kept(candidates.logits[:, 0], ids, keep, table)
        previous, law = draw(logits, ids, table, output_positions[:, k], generator)
        tokens.append(previous)
        laws.append(law)
        law_ids.append(ids)
        drawn_from.append(logits)
    return Proposal(torch.stack(tokens, dim=1), *_sparse_laws(laws, law_ids), tuple(drawn_from), None)


def _kept(logits: Tensor, ids: Tensor | None, keep: int, table: SamplingTable) -> tuple[Tensor, Tensor | None]:
    """The `keep` best of one slot's logits [R, K] and their target ids; all of them where no law is sent."""
    if keep <= 0 or keep >= logits.shape[-1] or table.all_greedy:
        return logits, ids
    logits, columns = largest(logits, keep)
    return logits, columns if ids is None else ids.gather(-1, columns)


def _sparse_laws(laws: list[Tensor | None], ids: list[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    present = [law for law in laws if law is not None]
    if not present:
        return None, None
    q_probs = torch.stack(present, dim=1)
    named = [x for x in ids if x is not None]
    if not named:
        return torch.arange(q_probs.shape[-1], device=q_probs.device).expand_as(q_probs), q_probs
    return torch.stack(named, dim=1), q_probs


def _confidence(head: ConfidenceHead | None, hidden: Tensor, embeddings: list[Tensor]) -> Tensor | None:
    if head is None:
        return None
    return head.logits(hidden, torch.stack(embeddings, dim=1) if head.needs_embeddings else None)
