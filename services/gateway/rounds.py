"""Verify rounds of one choice, and vLLM's `metrics.speculative_decoding` object made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.wire import Delta, Speculation


@dataclass(slots=True)
class RoundLog:
    """Per round: tokens drafted, verified (put to the target), accepted and kept."""

    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, delta: Delta, num_kept: int) -> None:
        """`num_kept`: tokens of the round that the client got. One of them is the round's own, so that over an answer the
        first token and accepted + 1 of every round add up to the tokens, also where the end cut a block."""
        if delta.is_round and num_kept > 0:
            self.drafted.append(delta.num_drafted)
            self.verified.append(delta.num_verified)
            self.accepted.append(min(delta.num_accepted, num_kept - 1))

    def body(self, draft_width: int, *, detailed: bool, asked: Speculation | None = None) -> dict[str, Any]:
        """vLLM's object, which load generators read, and three fields of ours: `num_proposed_draft_tokens`, and when the
        request had its own say, `mode` and `max_draft_tokens` as they were in force.

        Index j of the histogram counts the rounds that accepted j drafts. `num_draft_tokens` are those that were
        verified: drafts the planner left out were never put to the target.
        """
        steps, accepted, verified = len(self.accepted), sum(self.accepted), sum(self.verified)
        width = max(draft_width, max(self.accepted, default=0))
        numbers: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / verified if verified else 0.0,
            "acceptance_histogram": _histogram(self.accepted, width),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_tokens": width,
            "num_proposed_draft_tokens": sum(self.drafted),
        }
        if asked is not None:
            numbers |= {"mode": asked.planner or None, "max_draft_tokens": asked.max_draft_tokens}
        if detailed:
            numbers |= {"per_step_accepted": self.accepted, "per_step_drafted": self.verified}
        return {"speculative_decoding": numbers}


def _histogram(accepted: Sequence[int], width: int) -> list[int]:
    histogram = [0] * (width + 1)
    for count in accepted:
        histogram[count] += 1
    return histogram
