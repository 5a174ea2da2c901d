"""A call to the drafter and what comes of it: who is asked, what was proposed, and whether that is an answer at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.errors import DrafterLost
from scheduler.live import Live
from scheduler.wire import Draft, DraftAsk


@dataclass(frozen=True, slots=True)
class DraftCall:
    """What to ask the drafter for; no asks means that nobody drafts this step."""

    asks: tuple[DraftAsk, ...] = ()
    width: int = 0


@dataclass(slots=True)
class Proposal:
    """A draft that came back for `live`: at most `cap` of its tokens may be verified, `num_admitted` are."""

    live: Live
    draft: Draft
    cap: int
    probe: bool
    num_admitted: int = 0

    @property
    def num_drafted(self) -> int:
        return len(self.draft.token_ids)


def check_answer(call: DraftCall, drafts: Sequence[Draft], vocab_size: int) -> None:
    """Raises DrafterLost when the answer is not one draft per ask, in order, of ids that exist, with what is stated of each."""
    if [d.request_id for d in drafts] != [a.request_id for a in call.asks]:
        raise DrafterLost("the drafter answered other requests than it was asked")
    if not drafts:
        return
    if max(len(d.token_ids) for d in drafts) > call.width:
        raise DrafterLost("the drafter drafted more than it was asked")
    if not all(map(_states_each, drafts)):
        raise DrafterLost("the drafter stated confidences or laws of other tokens than it drafted")
    token_ids = np.concatenate([d.token_ids for d in drafts])
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise DrafterLost("the drafter drafted a token outside the target's vocabulary")


def _states_each(draft: Draft) -> bool:
    """Its confidences and laws, where it has them, are one per token."""
    size, q_ids, q_probs = len(draft.token_ids), draft.q_ids, draft.q_probs
    if draft.confidence is not None and draft.confidence.shape != (size,):
        return False
    return q_ids is None or q_probs is None or (q_ids.ndim == 2 and len(q_ids) == size and q_ids.shape == q_probs.shape)
