"""How good a drafter is on held-out answers, offline: the target's states are there, so no target has to run.

Accepted lengths count the bonus token. On greedy answers the rounds of greedy speculative decoding are replayed exactly
(what the drafter would propose after a true prefix is all that matters); on sampled ones the expected length
1 + sum of products of acceptances is averaged over all anchors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafter.train.blocks import build_batch, valid_anchors
from drafter.train.loss import LossConfig, target_laws, vocabulary_loss
from drafter.train.network import DraftNetwork
from drafter.train.states import States

_ANCHORS_PER_PASS = 96


@dataclass(slots=True)
class _Tally:
    """Sums of one group of answers; ratios are taken at the end."""

    tokens: int = 0
    rounds: int = 0
    expected: float = 0.0
    anchors: int = 0
    overlap: Tensor = field(default_factory=lambda: torch.zeros(0))
    reached: Tensor = field(default_factory=lambda: torch.zeros(0))

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.rounds:
            found["tau_greedy"] = round(self.tokens / self.rounds, 4)
        if self.anchors:
            found["tau_sampled"] = round(self.expected / self.anchors, 4)
            found["acceptance"] = [round(x, 4) for x in (self.overlap / self.reached.clamp_min(1)).tolist()]
        return found


@torch.no_grad()
def measure(network: DraftNetwork, sequences: Iterable[States]) -> dict[str, Any]:
    """tau_greedy, tau_sampled and acceptance by position (mean overlap of the laws at slot k), by domain and in all."""
    tallies: dict[str, _Tally] = {}
    confidence_error, slots = 0.0, 0
    for states in sequences:
        if states.answer_len < 2:
            continue
        matched, overlap, inside, error = _score(network, states)
        confidence_error, slots = confidence_error + error * int(inside.sum()), slots + int(inside.sum())
        for key in ("all", states.meta["domain"]):
            tally = tallies.setdefault(key, _Tally())
            if states.meta["temperature"] == 0:
                tokens, rounds = replay_greedy(matched.int().cumprod(1).sum(1).tolist())
                tally.tokens, tally.rounds = tally.tokens + tokens, tally.rounds + rounds
            else:
                _add_sampled(tally, overlap, inside)
    domains = {key: tally.report() for key, tally in sorted(tallies.items()) if key != "all"}
    total = tallies["all"].report() if "all" in tallies else {}
    if slots:
        total["confidence_abs_error"] = round(confidence_error / slots, 4)
    return {**total, "domains": domains}


def _add_sampled(tally: _Tally, overlap: Tensor, inside: Tensor) -> None:
    width = overlap.shape[1]
    if not len(tally.overlap):
        tally.overlap, tally.reached = torch.zeros(width), torch.zeros(width)
    whole = inside.all(1)
    tally.expected += float((1 + overlap[whole].cumprod(1).sum(1)).sum())
    tally.anchors += int(whole.sum())
    tally.overlap += (overlap * inside).sum(0)
    tally.reached += inside.sum(0)


def replay_greedy(accepted: list[int]) -> tuple[int, int]:
    """accepted[i]: drafts accepted when answer token i is the anchor. Tokens emitted and rounds taken; an answer that ends
    inside the accepted drafts gets no bonus."""
    at, rounds, last = 0, 0, len(accepted)
    while at < last:
        at, rounds = min(at + accepted[at] + 1, last), rounds + 1
    return last, rounds


def _score(network: DraftNetwork, states: States) -> tuple[Tensor, Tensor, Tensor, float]:
    """Per anchor and slot [A, γ]: is the drafted argmax the token written, overlap of the laws, is the slot inside."""
    width = network.arch.block_size
    columns, overlaps, labels, weights, errors = [], [], [], [], []
    for anchors in valid_anchors(states).split(_ANCHORS_PER_PASS):
        batch = build_batch([(states, anchors, width)], decay=4.0).to(network.lm_head.device)
        slots = batch.slots(network.row_of, len(network.draft_vocab_ids))
        hidden = network(batch.blocks)
        heads = network.head_terms(hidden, batch.blocks, batch.previous_ids)
        laws = target_laws(batch.last, batch.lse, network.lm_head)
        _, terms = vocabulary_loss(
            hidden, heads.mixed, heads.w2, lm_head=network.lm_head, laws=laws, slots=slots, config=LossConfig()
        )
        inside = slots.weights > 0
        if network.arch.has_confidence:
            errors.append((network.confidence_logits(hidden, heads.embeddings).sigmoid() - terms.overlap).abs()[inside])
        columns.append(terms.best)
        labels.append(slots.label_columns)
        overlaps.append(terms.overlap)
        weights.append(inside)
    best, label, overlap, inside = (torch.cat(x).cpu().view(-1, width) for x in (columns, labels, overlaps, weights))
    error = float(torch.cat(errors).mean()) if errors else 0.0
    return (best == label) & inside, overlap, inside, error
