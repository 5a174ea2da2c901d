"""What a step will cost, in the terms in which drafts are decided: the cost curve, the host's own time, and what is hidden.

Owns the refined curve and the running estimate of host seconds. Must not know requests, acceptance or planners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scheduler.admit import Seconds
from scheduler.refinement import RefinedCurve, tokens_within
from scheduler.stats import StepStats
from scheduler.throughput import CostCurve

_HOST_MEMORY = 0.05
_USUAL_MEMORY = 0.05
_MOST_HOST_S = 0.1
# Two cohorts must promise to be so much sooner through, for each step has a cost of its own.
_OVERLAP_PAYS = 0.95
# Prompt tokens per step that every longest step allows, so that prompts advance.
_LEAST_PREFILL = 16


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step without its drafts: last tokens of running answers (each gets a token), prompt tokens, tokens before each token
    on average, and cached tokens that it reads, once per request."""

    num_rounds: int
    num_prefill: int
    context_len: float
    kv_tokens: float

    @property
    def num_tokens(self) -> int:
        return self.num_rounds + self.num_prefill


@dataclass(slots=True)
class UsualRound:
    """What rounds of late were like, per running answer: the share that drafted, their width, drafts verified and accepted."""

    width: int
    drafting: float = 1.0
    num_verified: float = 1.0
    num_accepted: float = 1.0

    def observe(self, num_rounds: int, num_drafting: int, num_verified: int, num_accepted: int) -> None:
        self.drafting += _USUAL_MEMORY * (num_drafting / num_rounds - self.drafting)
        self.num_verified += _USUAL_MEMORY * (num_verified / num_rounds - self.num_verified)
        self.num_accepted += _USUAL_MEMORY * (num_accepted / num_rounds - self.num_accepted)


class Pricing:
    """curve: None when there is none. hidden: another step is verified meanwhile, so that a draft costs only what it takes
    longer than that. host_s, draft_host_s: the host's seconds in a step that nobody drafts for, and what drafts add to them.
    Whatever returns seconds of models needs a curve."""

    def __init__(self, curve: CostCurve | None) -> None:
        self.curve = RefinedCurve(curve) if curve is not None else None
        self.host_s = 0.0
        self.draft_host_s = 0.0
        self.hidden = False
        self._seen_plain = False

    def observe(self, step: StepStats) -> None:
        """What the last step took; a clock that jumped must not pass for work.

        Until a step was seen that nobody drafted for, drafting steps stand for it: what drafts add is then not known.
        """
        host_s = min(max(0.0, step.host_s), _MOST_HOST_S, 4.0 * (self.host_s + self.draft_host_s) + 1e-3)
        self._seen_plain |= step.num_drafting == 0
        if step.num_drafting and self._seen_plain:
            self.draft_host_s += _HOST_MEMORY * (max(0.0, host_s - self.host_s) - self.draft_host_s)
        else:
            self.host_s += _HOST_MEMORY * (host_s - self.host_s)
        if self.curve is not None:
            self.curve.observe(
                num_tokens=step.num_tokens,
                context_len=step.context_len,
                kv_tokens=step.kv_tokens,
                verify_s=step.verify_s,
                num_drafting=step.num_drafting,
                width=step.width,
                draft_s=step.draft_s,
            )

    def verify_seconds(self, load: StepLoad, more_tokens: int, count: int) -> Seconds:
        """[count] seconds of a step of that load and 0, 1, 2 ... tokens more, less what its prompt tokens take.

        Prompts must be computed whatever is drafted: counted in, they would make time look cheap (few tokens come of it) and
        drafts worth their price in just the steps that they lengthen most.
        """
        assert self.curve is not None
        seconds = self.curve.verify_seconds(load.num_tokens + more_tokens, count, load.context_len, load.kv_tokens)
        if load.num_prefill == 0:
            return seconds
        with_prompts, without = (
            self.curve.verify_seconds(n, 1, load.context_len, load.kv_tokens)[0]
            for n in (load.num_tokens, load.num_rounds)
        )
        return seconds - (with_prompts - without)

    def step_seconds(self, load: StepLoad, more_tokens: int, count: int, *, draft_s: float) -> Seconds:
        """The same with a draft of draft_s before it and the host's time."""
        seconds = self.verify_seconds(load, more_tokens, count)
        host_s = self.host_s + self.draft_host_s if draft_s else self.host_s
        return seconds + (max(0.0, draft_s - seconds[0]) if self.hidden else draft_s) + host_s

    def draft_table(self, num_requests: int, width: int, *, verify_s: float) -> Seconds:
        """[> num_requests, > width] seconds that a draft adds to a step that takes verify_s without one, with the host's."""
        assert self.curve is not None
        table = self.curve.draft_table(num_requests, width)
        seconds = np.maximum(0.0, table - verify_s) if self.hidden else table
        return np.where(table > 0.0, seconds + self.draft_host_s, seconds)

    def draft_s(self, num_requests: int, width: int) -> float:
        assert self.curve is not None
        return self.curve.draft_seconds(num_requests, width)

    def overlap_pays(self, num_requests: int, usual: UsualRound, context_len: float, *, or_plainly: bool) -> bool:
        """Whether two halves, one drafting while the other is verified, emit more than all in one step.

        They do where drafting takes longer than what a step costs whoever is in it; where a step costs the same for half as
        many, they do not. or_plainly: nobody has to draft, so they must emit more than plain decoding too.
        """
        assert self.curve is not None
        curve = self.curve

        def seconds(count: int) -> tuple[float, float]:
            num_tokens = round(count * (1.0 + usual.num_verified))
            verify_s = curve.verify_seconds(num_tokens, 1, context_len, count * context_len)[0]
            return curve.draft_seconds(math.ceil(count * usual.drafting), usual.width), float(verify_s)

        halves_s = 2 * (max(seconds((num_requests + 1) // 2)) + self.host_s)
        whole_s = sum(seconds(num_requests)) + self.host_s
        kv_tokens = num_requests * context_len
        plain_s = float(curve.verify_seconds(num_requests, 1, context_len, kv_tokens)[0]) + self.host_s
        otherwise_s = min(whole_s, plain_s * (1.0 + usual.num_accepted)) if or_plainly else whole_s
        return halves_s < _OVERLAP_PAYS * otherwise_s

    def prefill_budget(self, *, most: int, longest_s: float, draft_s: float, load: StepLoad) -> int:
        """Prompt tokens that may join a step so that it takes at most longest_s."""
        assert self.curve is not None
        room = tokens_within(
            self.curve,
            seconds=longest_s - draft_s - self.host_s,
            num_tokens=load.num_rounds,
            most=most,
            context_len=load.context_len,
            kv_tokens=load.kv_tokens,
        )
        return min(most, max(_LEAST_PREFILL, room))
