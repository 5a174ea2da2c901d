"""The step under way, between plan and apply: each request's share of it, and the values made from a share.

Pure: nothing here advances a request or owns anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.errors import InternalFault, ServingError
from scheduler.live import Live
from scheduler.pricing import StepLoad
from scheduler.proposals import Proposal
from scheduler.wire import Delta, Extension, FinishReason, Plan, TokenLogprob, Verdict


@dataclass(slots=True)
class Share:
    """One request's part in the step under way. is_round: its answer was already running."""

    live: Live
    num_tokens: int
    samples: bool
    is_round: bool
    proposal: Proposal | None = None

    @property
    def num_draft(self) -> int:
        return self.proposal.num_admitted if self.proposal else 0


@dataclass(slots=True)
class PendingStep:
    """Between plan and apply. epoch: the drafter's, to which the captured rows go. context_len, kv_tokens, num_drafting, width,
    gate_shut: as in StepStats."""

    plan: Plan
    epoch: int
    shares: list[Share]
    context_len: float
    kv_tokens: float
    predicted_s: float | None
    num_drafting: int
    width: int
    gate_shut: bool

    def __contains__(self, live: Live) -> bool:
        return any(share.live is live for share in self.shares)


@dataclass(slots=True)
class Outcome:
    """What `apply` counts while it goes through the shares."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_round_tokens: int = 0
    num_emitted: int = 0
    tokens_of_class: dict[str, list[int]] = field(default_factory=dict)


def load_of(shares: Sequence[Share]) -> StepLoad:
    num_tokens = sum(share.num_tokens for share in shares)
    before = sum(share.num_tokens * (share.live.num_computed + share.num_tokens / 2) for share in shares)
    num_rounds = sum(share.is_round for share in shares)
    kv_tokens = sum(share.live.num_computed + share.num_tokens for share in shares)
    return StepLoad(num_rounds, num_tokens - num_rounds, before / max(1, num_tokens), kv_tokens)


def extension_of(share: Share) -> Extension:
    live, num_draft = share.live, share.num_draft
    token_ids = live.token_ids[live.num_computed : live.num_computed + share.num_tokens]
    draft = share.proposal.draft if share.proposal and num_draft else None
    if draft is not None:
        token_ids = np.concatenate((token_ids, draft.token_ids[:num_draft]), dtype=np.int32)
    return Extension(
        request_id=live.request.request_id,
        start=live.num_computed,
        token_ids=token_ids,
        num_draft=num_draft,
        samples=share.samples,
        block_ids=live.blocks(),
        params=live.request.params,
        output_index=live.num_output,
        q_ids=draft.q_ids[:num_draft] if draft is not None and draft.q_ids is not None else None,
        q_probs=draft.q_probs[:num_draft] if draft is not None and draft.q_probs is not None else None,
        history_ids=live.token_ids[: live.num_known].copy() if live.request.params.needs_history else None,
    )


def check_verdict(share: Share, verdict: Verdict, vocab_size: int) -> None:
    """Raises InternalFault for an answer that this extension cannot have."""
    token_ids, num_accepted = verdict.token_ids, verdict.num_accepted
    if not share.samples:
        if token_ids or num_accepted:
            raise InternalFault("the target sampled where it was not asked to")
        return
    if not 0 <= num_accepted <= share.num_draft or len(token_ids) != num_accepted + 1:
        raise InternalFault(
            f"the target accepted {num_accepted} of {share.num_draft} drafts and gave {len(token_ids)} tokens"
        )
    if share.proposal is not None and token_ids[:-1] != tuple(share.proposal.draft.token_ids[:num_accepted].tolist()):
        raise InternalFault("the target accepted other tokens than were drafted")
    if share.live.request.params.num_logprobs is not None and len(verdict.logprobs or ()) != len(token_ids):
        raise InternalFault(f"the target gave {len(verdict.logprobs or ())} logprobs for {len(token_ids)} tokens")
    if not 0 <= token_ids[-1] < vocab_size:
        raise InternalFault(f"the target sampled token {token_ids[-1]} outside its vocabulary")


def delta_of(
    share: Share | None,
    committed: tuple[int, ...],
    num_accepted: int,
    *,
    logprobs: tuple[TokenLogprob, ...] | None = None,
    live: Live | None = None,
    reason: FinishReason | None = None,
    error: ServingError | None = None,
) -> Delta:
    """`live` only for the last delta, which carries the usage. logprobs: of the verdict, of which the committed are kept."""
    owner = live or (share.live if share else None)
    assert owner is not None
    return Delta(
        request_id=owner.request.request_id,
        token_ids=committed,
        is_round=share is not None and share.is_round,
        num_drafted=share.proposal.num_drafted if share and share.proposal else 0,
        num_verified=share.num_draft if share else 0,
        num_accepted=num_accepted,
        finish_reason=reason,
        usage=owner.usage if reason is not None else None,
        error=(type(error).__name__, str(error)) if error is not None else None,
        logprobs=logprobs[: len(committed)] if logprobs is not None else None,
    )
