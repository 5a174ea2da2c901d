"""PrefixScheduler: the whole state of serving, advanced by values. No clock, no awaiting, no ports.

A step is choose_drafts -> (the drafter) -> plan -> (the verifier) -> apply, and only `apply` advances a request. residency.py
decides whose known tokens are computed, drafting.py who drafts and how much is verified, commit.py what a token does.

The drafter's context: a request drafts from the rows that were captured without a gap up to its newest (Live.context_from).
Rows of steps that captured nothing, or went to a drafter that is gone, are missed; a few steps later the request drafts again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence

from scheduler.admit import parse_planner
from scheduler.commit import commit_all
from scheduler.config import SchedulerConfig, check_config
from scheduler.drafting import Drafting
from scheduler.errors import (
    BadParams,
    DeadlineExceeded,
    InternalFault,
    Overloaded,
    Rejected,
    ServingError,
    TooLong,
    VerifierLost,
    revive,
)
from scheduler.live import Live, new_live
from scheduler.proposals import DraftCall, Proposal, check_answer
from scheduler.residency import Residency
from scheduler.stats import Ledger, SchedulerStats, StepStats
from scheduler.step import Outcome, PendingStep, Share, check_verdict, delta_of, extension_of, load_of
from scheduler.tables import BlockTables
from scheduler.throughput import CostCurve
from scheduler.wire import Delta, Draft, DrafterInfo, FinishReason, Plan, Request, TokenLogprob, Verdict, VerifierInfo

logger = logging.getLogger(__name__)


class PrefixScheduler:
    """Raises SettingsError for settings that cannot work."""

    def __init__(
        self,
        config: SchedulerConfig,
        verifier: VerifierInfo,
        drafter: DrafterInfo | None = None,
        curve: CostCurve | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.verifier = verifier
        self.ledger = Ledger()
        self.last_step: StepStats | None = None
        self.drafting = Drafting(parse_planner(config.planner), drafter, curve, config.max_live)
        self.residency = Residency(config, self._new_tables())
        self._num_planned = 0
        self._pending: PendingStep | None = None

    # -- requests come and go --

    @property
    def has_work(self) -> bool:
        return bool(self.residency.live or self.residency.waiting)

    @property
    def max_request_tokens(self) -> int:
        """prompt + max_tokens of the longest request that can be served; the last token needs no KV row."""
        return min(self.verifier.max_model_len, self.residency.tables.capacity + 1)

    def add(self, request: Request, now: float) -> None:
        """Queues the request; raises Rejected kinds."""
        try:
            self._check_fits(request)
            if self.residency.get(request.request_id) is not None:
                raise BadParams(f"request_id {request.request_id!r} is already in use", "request_id")
            self.residency.add(self._new_live(request, now), now)
        except Rejected as error:
            self.ledger.rejected[type(error).__name__] += 1
            raise

    def cancel(self, request_id: str) -> Delta | None:
        """Ends the request; its last delta, or None when there is no such request or its step must end first."""
        live = self.residency.get(request_id)
        if live is None:
            return None
        if self._pending is not None and live in self._pending:
            live.cancelled = True
            return None
        return self._end(live, FinishReason.CANCELLED)

    def expire(self, now: float) -> list[Delta]:
        """Fails every request whose time has run out, or that has waited too long for a place. Between steps only."""
        ended = [self._fail(live, _out_of_time(live)) for live in self.residency.expired(now)]
        waiting = self.residency.waiting
        return ended + [
            self._fail(
                live,
                Overloaded(
                    f"the request waited {now - live.arrival_s:.0f} s for a place, with {waiting.num_before(live)} before it; "
                    f"the limit is {self.config.max_wait_s:g} s"
                ),
            )
            for live in waiting.overdue(now)
        ]

    def queue_position(self, request_id: str) -> int | None:
        """0 when it has a place, 1 when it is the next to get one; None when there is no such request."""
        live = self.residency.get(request_id)
        if live is None:
            return None
        return 0 if live.slot >= 0 else self.residency.waiting.num_before(live) + 1

    def fail(self, request_ids: Iterable[str], error: ServingError) -> list[Delta]:
        """Ends these requests with an error and drops the step under way."""
        self._pending = None
        lives = [self.residency.get(request_id) for request_id in request_ids]
        return [self._fail(live, error) for live in lives if live is not None]

    def fail_all(self, error: ServingError) -> list[Delta]:
        return self.fail([live.request.request_id for live in self.residency.everyone()], error)

    # -- the verbs --

    def choose_drafts(self, cohort: int | None = None) -> DraftCall:
        """Who drafts this step, and how wide: the first half of `draft`.

        cohort: with two steps in flight, whose step it is; the other one's may be between plan and apply meanwhile.
        """
        if cohort is not None:
            self.residency.balance(cohort)
        return self.drafting.choose(
            self.residency.members(cohort),
            step=self._num_planned + 1,
            backlog=self.residency.prefill_backlog(cohort),
            hidden=cohort is not None,
        )

    def overlap_pays(self) -> bool:
        """Two cohorts, one drafting while the other is verified, are expected to emit more than all at once."""
        return self.drafting.overlap_pays(self._decoding())

    def check_drafts(self, call: DraftCall, drafts: Sequence[Draft]) -> None:
        """Raises DrafterLost when they are not an answer to `call`."""
        check_answer(call, drafts, self.verifier.vocab_size)

    def plan(self, drafts: Sequence[Draft], now: float, cohort: int | None = None) -> Plan:
        """The step to verify. Until `apply` or a loss, asking again gives the same plan."""
        if self._pending is None:
            self._pending = self._make_step(drafts, now, cohort)
        return self._pending.plan

    def apply(self, verdicts: Sequence[Verdict]) -> list[Delta]:
        """Advances every request of the plan; at most one delta each. Raises InternalFault for verdicts of another plan."""
        pending = self._pending
        if pending is None:
            raise InternalFault("apply without a plan")
        if [v.request_id for v in verdicts] != [e.request_id for e in pending.plan.extensions]:
            raise InternalFault("the verdicts are not those of the plan")
        self._pending = None
        self._observe(pending, verdicts)
        outcome = Outcome()
        captured = pending.plan.capture and pending.epoch == self.residency.tables.cache.epoch
        deltas = [
            delta
            for share, verdict in zip(pending.shares, verdicts, strict=True)
            if (delta := self._advance(share, verdict, outcome, captured=captured)) is not None
        ]
        self.last_step = self._step_stats(pending, outcome)
        return deltas

    def record(self, step: StepStats) -> None:
        """The last step with its times."""
        self.ledger.record(step)
        self.drafting.record(step)

    def stats(self) -> SchedulerStats:
        """The counters, and the gauges that are known here."""
        tables, curve = self.residency.tables, self.drafting.prices.curve
        self.ledger.num_gate_probes = self.drafting.num_probes
        self.ledger.num_untrimmed_plans = self.drafting.num_untrimmed
        return SchedulerStats(
            **self.ledger.counters(self.drafting.width),
            num_live=len(self.residency.live),
            num_waiting=len(self.residency.waiting),
            kv_blocks_used=tables.num_used,
            kv_blocks_cached=tables.cache.num_idle,
            kv_blocks_total=tables.allocator.num_blocks - 1,
            planner=str(self.drafting.planner),
            trim_off_reason=self.drafting.trim_off_reason,
            gate_state=self.drafting.gate_state,
            draft_width=self.drafting.width,
            drafter_alive=self.drafting.alive,
            max_request_tokens=self.max_request_tokens,
            drift=self.drafting.drift,
            verify_cost_factor=curve.verify_factor if curve is not None else 1.0,
        )

    # -- workers come and go --

    def set_planner(self, text: str) -> None:
        """Between steps only; raises SettingsError. What nobody holds leaves the prefix cache: what one planner computed
        without the drafter's context would be a burden to the next, and planners that are compared must begin alike."""
        planner = parse_planner(text)
        if planner != self.drafting.planner:
            self.residency.tables.cache.clear()
            self.drafting.set_planner(planner)

    def drafter_lost(self) -> None:
        self.ledger.num_drafter_losses += 1
        self.drafting.disconnect()
        self._forget_contexts()

    def drafter_back(self, info: DrafterInfo) -> None:
        """Requests draft again as soon as they have a context; what was computed before is none of it."""
        self.drafting.connect(info)
        self._forget_contexts()

    def verifier_lost(self) -> list[Delta]:
        """No KV row can be relied on: everyone will be recomputed. Returns the endings of requests cancelled mid-step."""
        self.ledger.num_verifier_losses += 1
        self._pending = None
        self.residency.evict_all()
        self.residency.tables.cache.clear()
        cancelled = [live for live in self.residency.everyone() if live.cancelled]
        return [self._end(live, FinishReason.CANCELLED) for live in cancelled]

    def verifier_back(self, info: VerifierInfo) -> list[Delta]:
        """After `verifier_lost`: what it is now may differ. Returns the endings of requests it cannot serve any more."""
        same_model = _identity(info) == _identity(self.verifier)
        # The drafter's cache was sized for the blocks there were at first.
        self.verifier = dataclasses.replace(info, num_blocks=min(info.num_blocks, self.verifier.num_blocks))
        self.residency.abandon(self._new_tables())
        if not same_model:
            return self.fail_all(VerifierLost("the target came back as another model"))
        too_long = [r for r in self.residency.everyone() if len(r.token_ids) > self.max_request_tokens]
        return [self._fail(live, VerifierLost("the target came back with too little memory")) for live in too_long]

    def reset(self, error: ServingError) -> list[Delta]:
        """After a fault of our own: residents fail, and the books are begun anew, for they may be what is wrong.

        With no resident it was the next in line that could not be served, and it fails.
        """
        self._pending = None
        suspects = self.residency.abandon(self._new_tables())
        if not suspects and self.residency.waiting.head is not None:
            suspects = [self.residency.waiting.head]
        return [self._fail(live, error) for live in suspects]

    def drop_plan(self) -> None:
        """The plan was not verified; its requests stay as they were."""
        self._pending = None

    def check_integrity(self) -> None:
        """Raises InternalFault where the books do not add up."""
        self.residency.check_integrity()

    # -- inside --

    def _new_tables(self) -> BlockTables:
        return BlockTables(self.verifier.num_blocks, self.verifier.block_size, cached=self.config.prefix_cache)

    def _forget_contexts(self) -> None:
        self.residency.tables.cache.forget_contexts()
        for live in self.residency.live.values():
            self.residency.tables.miss(live)

    def _check_fits(self, request: Request) -> None:
        prompt, wanted = len(request.prompt_ids), request.params.max_tokens
        room = max(0, self.max_request_tokens - prompt)
        if wanted > room:
            what = "context" if self.verifier.max_model_len <= self.max_request_tokens else "KV cache"
            raise TooLong(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}: together {prompt + wanted}, "
                f"and the {what} holds {self.max_request_tokens}; "
                + (f"max_tokens can be at most {room}" if room else "shorten the prompt"),
                room,
            )

    def _new_live(self, request: Request, now: float) -> Live:
        timeout_s = self.config.default_timeout_s or math.inf if request.timeout_s is None else request.timeout_s
        return new_live(
            request,
            now=now,
            deadline_s=now + timeout_s,
            block_size=self.verifier.block_size,
        )

    def _make_step(self, drafts: Sequence[Draft], now: float, cohort: int | None) -> PendingStep:
        heals = self.drafting.captures and not self.drafting.shut
        schedule = self.residency.schedule(now, self._prefill_budget(), cohort, heals=heals)
        self.ledger.num_preemptions += schedule.num_preempted
        self._num_planned += 1
        for live in schedule.admitted:
            self._welcome(live, now)
        shares = [Share(live, n, samples=live.lag == n, is_round=live.decodes) for live, n in schedule.chunks]
        load = load_of(shares)
        proposals = self._attach(shares, drafts)
        self.drafting.admit(proposals, load, self._num_planned)
        plan = Plan(
            step=self._num_planned,
            extensions=tuple(extension_of(share) for share in shares),
            capture=self.drafting.captures,
        )
        num_drafts = sum(p.num_admitted for p in proposals)
        predicted_s = self.drafting.predicted_s(load, num_drafts) if shares else None
        call = self.drafting.call
        return PendingStep(
            plan,
            self.residency.tables.cache.epoch,
            shares,
            load.context_len,
            load.kv_tokens,
            predicted_s,
            len(call.asks),
            call.width,
            self.drafting.shut,
        )

    def _prefill_budget(self) -> int:
        most, longest_s = self.config.prefill_chunk, self.config.longest_step_s
        if longest_s <= 0.0:
            return most
        return self.drafting.prefill_budget(self._decoding(), most=most, longest_s=longest_s)

    def _decoding(self) -> list[Live]:
        return [live for live in self.residency.live.values() if live.decodes]

    def _welcome(self, live: Live, now: float) -> None:
        self.drafting.welcome(live, self._num_planned)
        if live.admitted_s is None:
            live.admitted_s = now
            live.cached_tokens = live.num_computed
            self.ledger.num_admitted += 1
            self.ledger.queue_s += now - live.arrival_s
            self.ledger.prefix_query_tokens += live.num_prompt
            self.ledger.prefix_hit_tokens += live.cached_tokens

    def _attach(self, shares: Sequence[Share], drafts: Sequence[Draft]) -> list[Proposal]:
        """Gives the shares their drafts. Room is taken for the width asked for, oldest request first, before any draft is
        looked at: cutting by room what a confidence has chosen would let a token's fate hang on the token."""
        by_id = {draft.request_id: draft for draft in drafts}
        proposals = []
        for share in shares:
            draft = by_id.get(share.live.request.request_id)
            if draft is not None and share.is_round:
                cap = min(self._room(share.live), len(draft.token_ids))
                share.proposal = self.drafting.propose(share.live, draft, cap)
                if share.proposal is not None:
                    proposals.append(share.proposal)
        return proposals

    def _room(self, live: Live) -> int:
        """How many drafted tokens may be verified: what the request allows, as far as there are blocks for their rows."""
        room = self.drafting.cap(live)
        while room > 0 and not self.residency.tables.grow(live, live.num_known + room):
            room -= 1
        return room

    def _advance(self, share: Share, verdict: Verdict, outcome: Outcome, *, captured: bool) -> Delta | None:
        live = share.live
        if live.cancelled:
            return self._end(live, FinishReason.CANCELLED)
        if verdict.error is not None:
            return self._fail(live, revive(*verdict.error))
        try:
            check_verdict(share, verdict, self.verifier.vocab_size)
            committed, reason = self._commit(share, verdict, captured=captured)
        except Exception as error:
            logger.exception("a request failed in apply", extra={"request_ids": (live.request.request_id,)})
            return self._fail(live, InternalFault(str(error)))
        if not share.samples:
            return None
        num_accepted = min(verdict.num_accepted, len(committed))
        outcome.num_emitted += len(committed)
        if share.is_round:
            outcome.verified.append(share.num_draft)
            outcome.accepted.append(num_accepted)
            outcome.num_round_tokens += len(committed)
            outcome.tokens_of_class.setdefault(live.request.text_class, []).append(len(committed))
        if reason is not None:
            return self._end(
                live, reason, share=share, committed=committed, num_accepted=num_accepted, logprobs=verdict.logprobs
            )
        return delta_of(share, committed, num_accepted, logprobs=verdict.logprobs)

    def _commit(self, share: Share, verdict: Verdict, *, captured: bool) -> tuple[tuple[int, ...], FinishReason | None]:
        """Rows first, then tokens: after a stop inside the accepted block the rows past it do not count."""
        live = share.live
        num_computed = live.num_computed + share.num_tokens + verdict.num_accepted
        committed, reason = commit_all(live, verdict.token_ids)
        live.num_computed = min(num_computed, live.num_known)
        if not captured:
            self.residency.tables.miss(live)
        self.residency.tables.publish(live)
        return committed, reason

    def _observe(self, pending: PendingStep, verdicts: Sequence[Verdict]) -> None:
        seen = [
            (share.proposal, verdict.num_accepted)
            for share, verdict in zip(pending.shares, verdicts, strict=True)
            if share.proposal is not None
        ]
        self.drafting.observe([p for p, _ in seen], [n for _, n in seen], pending.plan.step)

    def _step_stats(self, pending: PendingStep, outcome: Outcome) -> StepStats:
        shares = pending.shares
        return StepStats(
            step=pending.plan.step,
            num_tokens=pending.plan.num_tokens,
            num_prefill_tokens=sum(share.num_tokens for share in shares if not share.is_round),
            num_rounds=len(outcome.verified),
            num_drafting=pending.num_drafting,
            width=pending.width,
            num_drafted=sum(share.proposal.num_drafted for share in shares if share.proposal is not None),
            verified_lengths=tuple(outcome.verified),
            accepted_lengths=tuple(outcome.accepted),
            num_round_tokens=outcome.num_round_tokens,
            num_emitted=outcome.num_emitted,
            gate_shut=pending.gate_shut,
            context_len=pending.context_len,
            kv_tokens=pending.kv_tokens,
            tokens_of_class={name: tuple(counts) for name, counts in outcome.tokens_of_class.items()},
            predicted_s=pending.predicted_s,
        )

    def _fail(self, live: Live, error: ServingError) -> Delta:
        self.ledger.failed[type(error).__name__] += 1
        return self._end(live, FinishReason.ERROR, error=error)

    def _end(
        self,
        live: Live,
        reason: FinishReason,
        *,
        share: Share | None = None,
        committed: tuple[int, ...] = (),
        num_accepted: int = 0,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: ServingError | None = None,
    ) -> Delta:
        """The one place where a request leaves, with its last delta."""
        self.ledger.finished[reason.value] += 1
        delta = delta_of(share, committed, num_accepted, logprobs=logprobs, live=live, reason=reason, error=error)
        self.residency.remove(live)
        return delta


def _identity(info: VerifierInfo) -> tuple[str, int, int]:
    """What must not change under a running request."""
    return info.fingerprint, info.vocab_size, info.block_size


def _out_of_time(live: Live) -> DeadlineExceeded:
    whose = (
        "scheduler.default_timeout_s: set that, or the request's own timeout"
        if live.request.timeout_s is None
        else "its timeout: give it a longer one, at most gateway.max_timeout_s"
    )
    return DeadlineExceeded(
        f"the request did not finish within {round(live.deadline_s - live.arrival_s, 3):g} s, {whose}"
    )
