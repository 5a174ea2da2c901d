"""Sits on both ports of an engine in this process and notes every verify round: what was drafted, with which confidence, what
the target made of it. The one place where raw confidence logits leave the drafter.

The drafter behind it must state raw confidence (DrafterConfig.calibrated False); the recorder notes it and hands on the
calibrated one, as the drafter would, so that planners see what they would see when serving.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from drafter.calibration import Calibration, logits_of
from drafter.rounds import Round
from scheduler.ports import ROWS_PER_REQUEST, Drafter, Features, Verifier
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Extension, Grammar, Plan, Verdict, VerifierInfo


class Recorder:
    """rounds: by request id, in order. Rounds that max_tokens cut short are not noted: how long they could have been is
    unknown, and whether they are cut does not depend on their tokens, so leaving them out shifts nothing."""

    def __init__(self, calibration: Calibration, width: int) -> None:
        self.calibration = calibration
        self.rounds: defaultdict[str, list[Round]] = defaultdict(list)
        self._width = width
        self._drafts: dict[str, tuple[Draft, list[float] | None]] = {}

    def drafted(self, asks: Sequence[DraftAsk], drafts: Sequence[Draft]) -> list[Draft]:
        self._drafts.clear()
        return [self._calibrated(ask, draft) for ask, draft in zip(asks, drafts, strict=True)]

    def _calibrated(self, ask: DraftAsk, draft: Draft) -> Draft:
        if draft.confidence is None:
            self._drafts[ask.request_id] = (draft, None)
            return draft
        logits = logits_of(draft.confidence)
        self._drafts[ask.request_id] = (draft, logits.tolist())
        return dataclasses.replace(draft, confidence=self.calibration.apply(logits[None], [ask.params])[0])

    def verified(self, plan: Plan, verdicts: Sequence[Verdict]) -> None:
        for extension, verdict in zip(plan.extensions, verdicts, strict=True):
            if extension.samples and extension.output_index > 0 and self._has_room(extension):
                self.rounds[extension.request_id].append(self._round(extension, verdict))

    def _has_room(self, extension: Extension) -> bool:
        return extension.params.max_tokens - extension.output_index - 1 >= self._width

    def _round(self, extension: Extension, verdict: Verdict) -> Round:
        draft, logits = self._drafts.get(extension.request_id, (None, None))
        return Round(
            logits=logits,
            num_drafted=0 if draft is None else len(draft.token_ids),
            num_verified=extension.num_draft,
            token_ids=verdict.token_ids,
        )


class RecordedDrafter:
    """scheduler.ports.Drafter"""

    def __init__(self, inner: Drafter, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def describe(self) -> DrafterInfo:
        return await self._inner.describe()

    async def progress(self) -> int:
        return await self._inner.progress()

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Features]) -> list[Draft]:
        return self._recorder.drafted(asks, await self._inner.propose(asks, width, features))

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return await self._inner.measure(num_requests, widths)


class RecordedVerifier:
    """scheduler.ports.Verifier"""

    def __init__(self, inner: Verifier, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    async def describe(self) -> VerifierInfo:
        return await self._inner.describe()

    async def progress(self) -> int:
        return await self._inner.progress()

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Features | None]:
        verdicts, features = await self._inner.verify(plan)
        self._recorder.verified(plan, verdicts)
        return verdicts, features

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._inner.check_grammar(grammar)

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return await self._inner.measure(num_tokens, context_lens, rows_per_request)
