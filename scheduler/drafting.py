"""The drafting half of a step: who is asked for a draft and how wide, and how much of what came back is verified.

Owns when the gate is asked, the call under way and what became of it; what is known of the drafter is scheduler/belief.py's. Must
not know blocks; a proposal's `cap` says how many of its tokens have room. A request's own planner stands beside the deployment's:
what it fixes is verified whatever it costs, and the rest is weighed with that in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.admit import Planner, Probabilities, Rule, Seconds, admit, survivals
from scheduler.belief import Belief, Judgement
from scheduler.drift import DriftRow, class_index
from scheduler.forecast import Prices
from scheduler.gate import Choice, DraftGate
from scheduler.live import Live
from scheduler.pricing import Pricing, StepLoad, UsualRound
from scheduler.proposals import DraftCall, Proposal
from scheduler.standby import Standby
from scheduler.stats import StepStats
from scheduler.throughput import CostCurve
from scheduler.wire import Draft, DrafterInfo
from scheduler.wishes import fixed_width, insists, may_draft, most_drafts, planner_of

# Asking the gate costs up to 3 % of a step. Open it is asked again after so many, and at once when someone comes or goes; how
# long it waits while it is shut is scheduler/standby.py's.
_CHOOSE_AGAIN = 4
_BEFORE_ANY_PROBE = -1


class Drafting:
    def __init__(self, planner: Planner, info: DrafterInfo | None, curve: CostCurve | None, max_live: int) -> None:
        self.planner = planner
        self.prices = Pricing(curve)
        self.info: DrafterInfo | None = None
        self.alive = False
        self.gate_state = "off"
        self.shut = False
        self.num_probes = 0
        self.num_untrimmed = 0
        self.call = DraftCall()
        self._max_live = max_live
        self._last_drafted = np.zeros(max_live, dtype=np.int64)
        self._asked: dict[str, Live] = {}
        self._probe: Live | None = None
        self._judgement: Judgement | None = None
        self._usual = UsualRound(info.width if info is not None else 0)
        self._num_rounds = 1
        self._kept: tuple[list[int], Choice, int] | None = None
        self._promised, self._trial = 0.0, False
        self._standby = Standby()
        kernels.load()  # it may have to be compiled, and not in the first step
        if info is not None:
            self.connect(info)

    @property
    def active(self) -> bool:
        """There is a drafter, and the deployment wants one."""
        return self.alive and self.planner.rule is not Rule.OFF

    @property
    def captures(self) -> bool:
        """The drafter needs the target's hidden states of every row."""
        return self.active and self._needs_context and not self.suspended

    @property
    def suspended(self) -> bool:
        """Drafting is clearly not worth it at present, and nothing is done to be ready for it."""
        return self.planner.adaptive and self._standby.suspended

    @property
    def _needs_context(self) -> bool:
        return self.info is not None and bool(self.info.target_layer_ids)

    @property
    def width(self) -> int:
        return self.info.width if self.info else 0

    @property
    def trim_off_reason(self) -> str:
        if self.planner.adaptive and self.info is not None and self.prices.curve is None:
            return "no cost curve"
        return ""

    @property
    def drift(self) -> tuple[DriftRow, ...]:
        return self._belief.drift if self.info is not None else ()

    def set_planner(self, planner: Planner) -> None:
        self.planner = planner
        self.shut = False
        self._kept = None
        self._standby.interrupted()

    def connect(self, info: DrafterInfo) -> None:
        """The drafter is there, for the first time or again, perhaps another one."""
        if self.info != info:
            self._belief = Belief(self._max_live, info.width)
            self._gate = DraftGate(info.width, variable_width=info.variable_width, states=info.has_confidence)
            self._kept = None
            self._standby = Standby()
        self.info = info
        self.alive = True

    def disconnect(self) -> None:
        self.alive = False
        self.call = DraftCall()
        self._asked.clear()

    def welcome(self, live: Live, step: int) -> None:
        """`live` has just got its slot."""
        if self.info is not None:
            self._belief.welcome(live.slot, class_index(live.request.text_class))
            self._kept = None
        if insists(live, self.planner):
            self._standby.wake()
        self._last_drafted[live.slot] = step

    def choose(self, residents: Sequence[Live], *, step: int, backlog: int, hidden: bool = False) -> DraftCall:
        """backlog: prompt tokens that will be in the step. hidden: another step is verified meanwhile, so that a draft costs
        only what it takes longer than that."""
        self.prices.hidden = hidden
        self._promised, self._trial = 0.0, False
        self._asked.clear()
        self._probe = None
        self.call = DraftCall()
        if not self.active:
            self.shut = False
            self.gate_state = "off"
            return self.call
        assert self.info is not None
        decoding = [live for live in residents if live.decodes]
        # a wish counts from when it can be followed, so that this is a reason to ask
        wishes = self._wishes(self._with_context(decoding))
        wanted = any(insists(live, self.planner) for live in residents)
        if wanted:
            self._standby.wake()  # the other cohort, which has nobody like that, was suspended
        if self.shut:
            self.gate_state = "suspended" if self.suspended else "shut"
        if self.shut and self._standby.lasts(step, len(decoding), wishes):
            return self.call
        candidates = [live for live in decoding if may_draft(live, self.planner, self.info)]
        if self.suspended and not self._wakes(candidates, decoding, backlog, step, wishes):
            self.shut, self.gate_state = True, "suspended"
            return self.call
        self.shut = False
        able = self._with_context(candidates)
        if not able:
            return self.call
        self._ask(able, self._kept_or_new(able, _load_of(decoding, backlog), step), step)
        if not self.shut:
            self._standby.opened()
            return self.call
        self._standby.shut(
            step,
            margin=self._gate.margin,
            next_probe=self._gate.next_probe,
            may_suspend=self.planner.adaptive and not self.call.asks and not wanted,
            num_decoding=len(decoding),
            wishes=wishes,
        )
        return self.call

    def propose(self, live: Live, draft: Draft, cap: int) -> Proposal | None:
        """The draft, if it has tokens that may be verified and was made for this request as it is now."""
        if self._asked.get(live.request.request_id) is not live or cap < 1:
            return None
        return Proposal(live, draft, cap, probe=live is self._probe)

    def admit(self, proposals: Sequence[Proposal], load: StepLoad, step: int) -> None:
        """Sets how many tokens of each are verified: first what planners fix, then what is weighed, with that in the step."""
        if not proposals:
            return
        self._num_rounds = load.num_rounds
        caps = np.array([p.cap for p in proposals], dtype=np.int64)
        judgement = self._judge(proposals, caps)
        rows_of: dict[Planner, list[int]] = {}
        for row, proposal in enumerate(proposals):
            rows_of.setdefault(planner_of(proposal.live, self.planner), []).append(row)
        more_tokens, more_emitted = 0, 0.0
        for planner in sorted(rows_of, key=lambda planner: (planner.adaptive, planner.rule)):
            rows = np.array(rows_of[planner])
            if planner.adaptive and self.prices.curve is None:
                self.num_untrimmed += 1
            lengths = admit(
                planner,
                confidence=(judgement.believed if planner.adaptive else judgement.filled)[rows],
                caps=caps[rows],
                num_sampling=load.num_rounds + more_emitted,
                step_seconds=self._step_seconds(load, more_tokens, int(caps[rows].sum()) + 1),
                outlook=self._belief.outlook(judgement, rows, caps[rows], step) if planner.rule is Rule.AUTO else None,
            )
            # A probe that verified nothing would have found nothing. It was chosen before its tokens were drawn.
            lengths = np.maximum(lengths, [proposals[row].probe or self._trial for row in rows])
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
                proposals[row].num_admitted = length
            more_tokens += int(lengths.sum())
            if len(rows_of) > 1:
                more_emitted += float(survivals(confidence=judgement.believed[rows], caps=lengths).sum())
        self._judgement = judgement
        self._belief.remember(judgement, np.array([p.num_drafted for p in proposals]), step)

    def record(self, step: StepStats) -> None:
        """What the step took, and brought: the forecast it was chosen by is held against that, in the seconds that are reckoned
        with, for the curve follows the real ones."""
        self.prices.observe(step)
        if self.info is None:
            return
        if step.predicted_s and step.num_drafting and not step.num_prefill_tokens and (self._promised or self._trial):
            host_s = self.prices.host_s + self.prices.draft_host_s
            if self._trial:
                # Seconds are what a trial is to find out; tokens of one step are luck. Times that are not positive are a
                # clock's that was set back.
                faster = (step.predicted_s + host_s) / max(step.draft_s + step.verify_s + host_s, 1e-9)
                real = min(step.draft_s, step.verify_s) > 0.0
                self._gate.tried(step.step, success=real and self._gate.margin * faster > 1.0)
            else:
                came = step.num_round_tokens / (step.predicted_s + host_s)
                self._gate.trust.observe(promised=self._promised, came=came, num_rounds=step.num_rounds)
        elif self.shut:
            self._gate.trust.rest()

    def observe(self, proposals: Sequence[Proposal], num_accepted: Sequence[int], step: int) -> None:
        """What the target accepted of each proposal."""
        if self.info is None:
            return
        self._belief.pass_step()
        if not proposals:
            return
        assert self._judgement is not None
        num_verified = np.array([p.num_admitted for p in proposals])
        self._usual.observe(self._num_rounds, len(proposals), int(num_verified.sum()), sum(num_accepted))
        self._belief.observe(
            self._judgement,
            num_drafted=np.array([p.num_drafted for p in proposals]),
            num_verified=num_verified,
            num_accepted=np.asarray(num_accepted),
        )
        for proposal, count in zip(proposals, num_accepted, strict=True):
            if proposal.probe:
                self._gate.probed(step, success=count > 0)

    def predicted_s(self, load: StepLoad, num_drafts: int) -> float | None:
        """Seconds of draft + verify according to the curve."""
        curve = self.prices.curve
        if curve is None:
            return None
        num_tokens = load.num_tokens + num_drafts
        return float(curve.verify_seconds(num_tokens, 1, load.context_len, load.kv_tokens)[0]) + self._draft_s()

    def overlap_pays(self, decoding: Sequence[Live]) -> bool:
        """Whether these requests, of which some draft, are better served as two cohorts; without a curve they are."""
        if len(decoding) < 2 or not self.active or self.shut:
            return False
        if self.prices.curve is None:
            return True
        context_len = _load_of(decoding, 0).context_len
        return self.prices.overlap_pays(len(decoding), self._usual, context_len, or_plainly=self.planner.adaptive)

    def prefill_budget(self, decoding: Sequence[Live], *, most: int, longest_s: float) -> int:
        """Prompt tokens that may join the next step of these running answers, as far as the curve knows."""
        if self.prices.curve is None or not decoding:
            return most
        return self.prices.prefill_budget(
            most=most, longest_s=longest_s, draft_s=self._draft_s(), load=_load_of(decoding, 0)
        )

    def cap(self, live: Live) -> int:
        """Most drafted tokens that may be verified for it, within the width that was asked for."""
        return min(most_drafts(live, self.planner), self.call.width)

    def _wishes(self, lives: Sequence[Live]) -> list[str]:
        """Whose drafts may not be for the gate to weigh, by request id: all, but those without a wish where the deployment
        weighs."""
        weighed = self.planner.adaptive
        return [live.request.request_id for live in lives if live.request.speculation is not None or not weighed]

    def _with_context(self, lives: Sequence[Live]) -> list[Live]:
        return [live for live in lives if live.has_context or not self._needs_context]

    def _wakes(
        self, candidates: Sequence[Live], decoding: Sequence[Live], backlog: int, step: int, wishes: list[str]
    ) -> bool:
        """Whether contexts are wanted again, for the gate would open if there were any, or to look anew."""
        opens = bool(candidates) and not self._choice(candidates, _load_of(decoding, backlog), step, probing=False).shut
        return self._standby.wakes(step, would_open=opens, num_decoding=len(decoding), wishes=wishes)

    def _kept_or_new(self, candidates: Sequence[Live], load: StepLoad, step: int) -> Choice:
        """The last choice while it is fresh, nobody has come or gone, and no probe is due."""
        slots = [live.slot for live in candidates]
        if self._kept is not None and load.num_prefill == 0:
            kept_slots, choice, until = self._kept
            whole = len(choice.rows) == len(slots) and choice.width == self.width
            if slots == kept_slots and step < until and (whole or step < self._gate.next_probe):
                return choice
        choice = self._choice(candidates, load, step)
        lasts = choice.probe < 0 and not choice.trial and not load.num_prefill
        self._kept = (slots, choice, step + _CHOOSE_AGAIN) if lasts else None
        return choice

    def _choice(self, candidates: Sequence[Live], load: StepLoad, step: int, *, probing: bool = True) -> Choice:
        """Who of the candidates drafts: those whose planner says so, and of the others those that pay beside them, or where
        probing that are to be heard of."""
        assert self.info is not None
        weighed = self.prices.curve is not None
        widths = [fixed_width(live, self.planner, self.info, weighed=weighed) for live in candidates]
        fixed = np.array([row for row, width in enumerate(widths) if width is not None], dtype=np.int64)
        widest = max((width for width in widths if width is not None), default=0)
        if len(fixed) == len(candidates):
            return Choice(fixed, widest)
        free = np.array([row for row, width in enumerate(widths) if width is None], dtype=np.int64)
        slots = _slots([candidates[row] for row in free])
        caps = np.array([most_drafts(candidates[row], self.planner) for row in free])
        verify_s = self.prices.verify_seconds(load, len(fixed) * widest, len(free) * self.info.width + 1)
        table = self.prices.draft_table(len(candidates), self.info.width, verify_s=float(verify_s[0]))
        choice = self._gate.choose(
            step=step if probing else _BEFORE_ANY_PROBE,
            survival=self._belief.usual(slots, caps),
            spread=self._belief.spread,
            may_try=not (len(fixed) or load.num_prefill or self.prices.hidden),
            idle_steps=step - self._last_drafted[slots],
            prices=Prices(
                num_sampling=load.num_rounds,
                verify_seconds=verify_s + self.prices.host_s,
                draft_seconds=_beside(table, len(fixed), widest),
                looks_ahead=self.planner.rule is Rule.AUTO,
            ),
        )
        probe = int(free[choice.probe]) if choice.probe >= 0 else choice.probe
        rows = np.sort(np.concatenate((fixed, free[choice.rows])))
        if len(fixed):
            return Choice(rows, max(choice.width, widest), probe=probe)
        return replace(choice, rows=rows, probe=probe)

    def _ask(self, candidates: Sequence[Live], choice: Choice, step: int) -> None:
        assert self.info is not None
        chosen = [candidates[row] for row in choice.rows]
        self.shut = choice.shut
        self._promised = 0.0 if self.prices.hidden else choice.promised
        self._trial = choice.trial
        self.gate_state = "shut" if choice.shut else "open" if len(chosen) == len(candidates) else "partial"
        if choice.probe >= 0:
            self._probe = candidates[choice.probe]
        self.num_probes += choice.probe >= 0 or choice.trial
        if not chosen:
            return
        width = choice.width
        if self.info.variable_width:
            width = min(width, max(most_drafts(live, self.planner) for live in chosen))
        for live in chosen:
            self._asked[live.request.request_id] = live
            self._last_drafted[live.slot] = step
        self._usual.width = width
        self.call = DraftCall(tuple(live.ask(with_tokens=self.info.needs_tokens) for live in chosen), width)

    def _judge(self, proposals: Sequence[Proposal], caps: npt.NDArray[np.int64]) -> Judgement:
        requests = [p.live.request for p in proposals]
        groups = np.array([2 * class_index(r.text_class) + r.params.greedy for r in requests], dtype=np.int64)
        return self._belief.judge(_slots([p.live for p in proposals]), groups, caps, self._confidence(proposals))

    def _confidence(self, proposals: Sequence[Proposal]) -> Probabilities:
        """[R, width] as the drafts state it; NaN past their ends, and where the drafter states none."""
        confidence = np.full((len(proposals), self.width), np.nan)
        for row, proposal in enumerate(proposals):
            if proposal.draft.confidence is not None:
                confidence[row, : proposal.num_drafted] = proposal.draft.confidence
        return confidence

    def _step_seconds(self, load: StepLoad, more_tokens: int, count: int) -> Seconds | None:
        if self.prices.curve is None:
            return None
        return self.prices.step_seconds(load, more_tokens, count, draft_s=self._draft_s())

    def _draft_s(self) -> float:
        return self.prices.draft_s(len(self.call.asks), self.call.width)


def _beside(table: Seconds, num_fixed: int, fixed_width: int) -> Seconds:
    """[n, w] seconds of a draft when n more requests draft w tokens beside `num_fixed` that draft `fixed_width`."""
    if num_fixed == 0:
        return table
    widths = np.maximum(np.arange(table.shape[1]), fixed_width)
    return table[num_fixed:, widths]


def _load_of(decoding: Sequence[Live], backlog: int) -> StepLoad:
    kv_tokens = sum(live.num_computed for live in decoding)
    return StepLoad(len(decoding), backlog, kv_tokens / len(decoding), kv_tokens)


def _slots(lives: Sequence[Live]) -> npt.NDArray[np.int64]:
    return np.array([live.slot for live in lives], dtype=np.int64)
