"""The drafting half of a step: who is asked for a draft and how wide, and how much of what came back is verified.

Owns what is known of the drafter, the acceptance estimates, the gate and the lookups in the cost curve. Must not know blocks;
a proposal's `cap` says how many of its tokens have room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.admit import Planner, Probabilities, Rule, Seconds, admit, survivals
from scheduler.errors import DrafterLost
from scheduler.estimates import AcceptanceEstimates
from scheduler.gate import Choice, DraftGate
from scheduler.live import Live
from scheduler.throughput import CostCurve
from scheduler.wire import Draft, DraftAsk, DrafterInfo

_HOST_MEMORY = 0.05


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


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step without its drafts: tokens, requests that sample, tokens before each token on average."""

    num_tokens: int
    num_sampling: int
    context_len: float


class Drafting:
    def __init__(self, planner: Planner, info: DrafterInfo | None, curve: CostCurve | None, max_live: int) -> None:
        self.planner = planner
        self.curve = curve
        self.info: DrafterInfo | None = None
        self.alive = False
        self.gate_state = "off"
        self.shut = False
        self.num_probes = 0
        self.call = DraftCall()
        self._max_live = max_live
        self._last_drafted = np.zeros(max_live, dtype=np.int64)
        self._asked: dict[str, Live] = {}
        self._probe: Live | None = None
        self._stated: Probabilities = np.zeros((0, 0))
        self._host_s = 0.0
        if info is not None:
            self.connect(info)

    @property
    def active(self) -> bool:
        """There is a drafter, and the planner wants one."""
        return self.alive and self.planner.rule is not Rule.OFF

    @property
    def captures(self) -> bool:
        """The drafter needs the target's hidden states of every row."""
        return self.active and self.info is not None and bool(self.info.target_layer_ids)

    @property
    def width(self) -> int:
        return self.info.width if self.info else 0

    @property
    def trim_off_reason(self) -> str:
        if self.planner.rule is Rule.ALGORITHM1 and self.info is not None and self.curve is None:
            return "no cost curve"
        return ""

    def connect(self, info: DrafterInfo) -> None:
        """The drafter is there, for the first time or again, perhaps another one."""
        if self.info != info:
            self._estimates = AcceptanceEstimates(self._max_live, info.width)
            self._gate = DraftGate(info.width, variable_width=info.variable_width)
        self.info = info
        self.alive = True

    def disconnect(self) -> None:
        self.alive = False
        self.call = DraftCall()
        self._asked.clear()

    def welcome(self, live: Live, step: int) -> None:
        """`live` has just got its slot."""
        if self.info is not None:
            self._estimates.reset(live.slot)
        self._last_drafted[live.slot] = step

    def choose(self, residents: Sequence[Live], *, epoch: int, step: int, backlog: int) -> DraftCall:
        """backlog: prompt tokens that will be in the step."""
        self._asked.clear()
        self._probe = None
        self.call = DraftCall()
        self.shut = False
        if not self.active:
            self.gate_state = "off"
            return self.call
        decoding = [live for live in residents if live.decodes]
        candidates = [live for live in decoding if self._may_draft(live, epoch)]
        if candidates:
            context_len = sum(live.num_computed for live in decoding) / len(decoding)
            load = StepLoad(len(decoding) + backlog, len(decoding), context_len)
            self.call = self._call(candidates, self._choice(candidates, load, step), step)
        return self.call

    def propose(self, live: Live, draft: Draft, cap: int) -> Proposal | None:
        """The draft, if it has tokens that may be verified and was made for this request as it is now."""
        if self._asked.get(live.request.request_id) is not live or cap < 1:
            return None
        return Proposal(live, draft, cap, probe=live is self._probe)

    def admit(self, proposals: Sequence[Proposal], load: StepLoad) -> None:
        """Sets how many tokens of each are verified."""
        if not proposals:
            return
        caps = np.array([p.cap for p in proposals], dtype=np.int64)
        self._stated = self._confidence(proposals)
        lengths = admit(
            self.planner,
            confidence=self._filled_in(proposals),
            caps=caps,
            num_sampling=load.num_sampling,
            step_seconds=self._step_seconds(load, int(caps.sum()) + 1),
        )
        for proposal, length in zip(proposals, lengths.tolist(), strict=True):
            # A probe that verified nothing would have found nothing. It was chosen before its tokens were drawn.
            proposal.num_admitted = max(length, 1) if proposal.probe else length

    def predicted_s(self, load: StepLoad, num_drafts: int) -> float | None:
        """Seconds of draft + verify according to the curve."""
        if self.curve is None:
            return None
        verify_s = float(self.curve.verify_seconds(load.num_tokens + num_drafts, 1, load.context_len)[0])
        return verify_s + self._draft_s()

    def observe(self, proposals: Sequence[Proposal], num_accepted: Sequence[int], step: int) -> None:
        """What the target accepted of each proposal."""
        if self.info is None:
            return
        self._estimates.tick()
        if not proposals:
            return
        self._estimates.observe(
            slots=_slots([p.live for p in proposals]),
            num_drafted=np.array([p.num_drafted for p in proposals]),
            num_verified=np.array([p.num_admitted for p in proposals]),
            num_accepted=np.asarray(num_accepted),
            confidence=self._stated,
        )
        for proposal, accepted in zip(proposals, num_accepted, strict=True):
            if proposal.probe:
                self._gate.probed(step, success=accepted > 0)

    def observe_host(self, seconds: float) -> None:
        """Seconds of the last step outside the models: they pass whatever is verified."""
        self._host_s += _HOST_MEMORY * (seconds - self._host_s)

    def _may_draft(self, live: Live, epoch: int) -> bool:
        """More than one token is still to come, and its context is one that the drafter has, and can have."""
        assert self.info is not None
        return live.num_remaining > 1 and live.epoch == epoch and live.num_computed <= self.info.max_len

    def _choice(self, candidates: Sequence[Live], load: StepLoad, step: int) -> Choice:
        assert self.info is not None
        everyone = np.arange(len(candidates))
        if self.planner.rule is Rule.FIXED and self.info.variable_width:
            return Choice(everyone, min(int(self.planner.value), self.info.width))
        if self.planner.rule is not Rule.ALGORITHM1 or self.curve is None:
            return Choice(everyone, self.info.width)
        slots = _slots(candidates)
        caps = np.array([live.num_remaining - 1 for live in candidates])
        verify_s = self.curve.verify_seconds(load.num_tokens, len(candidates) * self.info.width + 1, load.context_len)
        return self._gate.choose(
            step=step,
            survival=survivals(confidence=self._estimates.rates(slots), caps=caps),
            idle_steps=step - self._last_drafted[slots],
            num_sampling=load.num_sampling,
            verify_seconds=verify_s + self._host_s,
            draft_seconds=self.curve.draft_table(len(candidates), self.info.width),
        )

    def _call(self, candidates: Sequence[Live], choice: Choice, step: int) -> DraftCall:
        assert self.info is not None
        chosen = [candidates[row] for row in choice.rows]
        self.shut = choice.shut
        self.gate_state = "shut" if choice.shut else "open" if len(chosen) == len(candidates) else "partial"
        if choice.probe >= 0:
            self._probe = candidates[choice.probe]
            self.num_probes += 1
        if not chosen:
            return DraftCall()
        width = choice.width
        if self.info.variable_width:
            width = min(width, max(live.num_remaining for live in chosen) - 1)
        for live in chosen:
            self._asked[live.request.request_id] = live
            self._last_drafted[live.slot] = step
        return DraftCall(tuple(live.ask(with_tokens=self.info.needs_tokens) for live in chosen), width)

    def _confidence(self, proposals: Sequence[Proposal]) -> Probabilities:
        """[R, width] as the drafts state it; NaN past their ends, and where the drafter states none."""
        confidence = np.full((len(proposals), self.width), np.nan)
        for row, proposal in enumerate(proposals):
            if proposal.draft.confidence is not None:
                confidence[row, : proposal.num_drafted] = proposal.draft.confidence
        return confidence

    def _filled_in(self, proposals: Sequence[Proposal]) -> Probabilities:
        """The stated confidences, with the running estimates for drafts that state none."""
        without = [row for row, proposal in enumerate(proposals) if proposal.draft.confidence is None]
        if not without:
            return self._stated
        confidence = self._stated.copy()
        confidence[without] = self._estimates.rates(_slots([proposals[row].live for row in without]))
        return confidence

    def _step_seconds(self, load: StepLoad, count: int) -> Seconds | None:
        if self.curve is None:
            return None
        return self.curve.verify_seconds(load.num_tokens, count, load.context_len) + (self._draft_s() + self._host_s)

    def _draft_s(self) -> float:
        assert self.curve is not None
        return self.curve.draft_seconds(len(self.call.asks), self.call.width)


def check_answer(call: DraftCall, drafts: Sequence[Draft], vocab_size: int) -> None:
    """Raises DrafterLost when the answer is not one draft per ask, in order, of ids that exist."""
    if [d.request_id for d in drafts] != [a.request_id for a in call.asks]:
        raise DrafterLost("the drafter answered other requests than it was asked")
    if not drafts:
        return
    if max(len(d.token_ids) for d in drafts) > call.width:
        raise DrafterLost("the drafter drafted more than it was asked")
    token_ids = np.concatenate([d.token_ids for d in drafts])
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise DrafterLost("the drafter drafted a token outside the target's vocabulary")


def _slots(lives: Sequence[Live]) -> npt.NDArray[np.int64]:
    return np.array([live.slot for live in lives], dtype=np.int64)
