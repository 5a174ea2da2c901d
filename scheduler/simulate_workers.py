"""A target and a drafter that play acceptance traces and know what each call takes, behind the ports that real ones have.

Owns what a simulated machine answers and how long that takes it, and what its cost curve is. Must not know time or planners. The
token at an output position is a function of request and position, so that texts can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler.curves import CostLaw, StepWork
from scheduler.errors import BadParams
from scheduler.ports import ROWS_PER_REQUEST
from scheduler.simulate_traces import Traces
from scheduler.throughput import CostCurve, CurvePoints, measure_curve
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Extension, Grammar, Plan, Verdict, VerifierInfo

_T = TypeVar("_T")

PROMPT, STOP = 0, 1
_FIRST_WORD, _NUM_WORDS = 2, 61
_BLOCK_SIZE = 128
_EXACT_TOKENS = 4096


class SimulatedTarget:
    """scheduler.ports.Verifier. Goes on with its own text, and accepts drafts as far as they are that text."""

    def __init__(self, law: CostLaw, *, max_live: int, max_request_tokens: int) -> None:
        blocks = max_live * math.ceil((max_request_tokens + 1) / _BLOCK_SIZE) + 1
        self._law = law
        self._info = VerifierInfo(
            num_blocks=blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=max_request_tokens + 1,
            vocab_size=_FIRST_WORD + _NUM_WORDS,
            target_layer_ids=(0,),
            device="simulated",
            dtype="none",
            fingerprint=law.name,
            kv_bytes_per_token=0,
        )
        self._stops_at: dict[str, int] = {}

    @property
    def info(self) -> VerifierInfo:
        return self._info

    def welcome(self, request_id: str, num_output: int) -> None:
        """The request will stop after so many tokens."""
        self._stops_at[request_id] = num_output

    def forget(self, request_id: str) -> None:
        del self._stops_at[request_id]

    def text(self, request_ids: Sequence[str], positions: Sequence[int], count: int) -> npt.NDArray[np.int32]:
        """[n, count] what each request's text says from that output position on."""
        numbers = np.array([int(name) for name in request_ids])[:, None]
        where = np.asarray(positions)[:, None] + np.arange(count)
        words = _FIRST_WORD + (7919 * numbers + where * where + 31 * where) % _NUM_WORDS
        ends = np.array([self._stops_at[name] for name in request_ids])[:, None] - 1
        return np.where(where == ends, STOP, words).astype(np.int32)

    def answer(self, plan: Plan) -> list[Verdict]:
        if not plan.extensions:
            return []
        longest = 1 + max(e.num_draft for e in plan.extensions)
        text = self.text([e.request_id for e in plan.extensions], [e.output_index for e in plan.extensions], longest)
        return [_verdict(extension, row) for extension, row in zip(plan.extensions, text, strict=True)]

    def seconds(self, plan: Plan) -> float:
        return self._law.verify_s(work_of(plan))

    async def progress(self) -> int:
        return 0

    async def describe(self) -> VerifierInfo:
        return self._info

    async def verify(self, plan: Plan) -> tuple[list[Verdict], None]:
        return self.answer(plan), None

    async def check_grammar(self, grammar: Grammar) -> None:
        raise BadParams("a simulated target follows no grammar", "response_format")

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return [
            [self._law.verify_s(_measured_work(n, context, rows_per_request)) for n in num_tokens]
            for context in context_lens
        ]


class SimulatedDrafter:
    """scheduler.ports.Drafter."""

    def __init__(self, law: CostLaw, traces: Traces, target: SimulatedTarget, *, variable_width: bool) -> None:
        self._law = law
        self._traces = traces
        self._target = target
        self._info = DrafterInfo(
            kind="simulated",
            width=traces.width,
            variable_width=variable_width,
            has_confidence=traces.states,
            max_len=1 << 30,
            target_layer_ids=(0,),
            fingerprint=law.name,
        )

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def drafts(self, asks: Sequence[DraftAsk], width: int) -> list[Draft]:
        if not asks:
            return []
        names = [ask.request_id for ask in asks]
        positions = [ask.output_index for ask in asks]
        confidence, num_right = self._traces.draft([int(name) for name in names], positions, width)
        token_ids = self._target.text(names, positions, width)
        wrong = np.flatnonzero(num_right < width)
        token_ids[wrong, num_right[wrong]] = PROMPT
        rows = confidence if confidence is not None else [None] * len(names)
        return [Draft(name, ids, row) for name, ids, row in zip(names, token_ids, rows, strict=True)]

    def seconds(self, num_requests: int, width: int) -> float:
        return self._law.draft_s(num_requests, width)

    async def progress(self) -> int:
        return 0

    async def describe(self) -> DrafterInfo:
        return self._info

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[object]) -> list[Draft]:
        return self.drafts(asks, width)

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return [[self._law.draft_s(requests, width) for width in widths] for requests in num_requests]


def _verdict(e: Extension, text: npt.NDArray[np.int32]) -> Verdict:
    if not e.samples:
        return Verdict(e.request_id, 0, ())
    drafted = e.token_ids[len(e.token_ids) - e.num_draft :]
    wrong = np.flatnonzero(drafted != text[: e.num_draft])
    accepted = int(wrong[0]) if len(wrong) else e.num_draft
    return Verdict(e.request_id, accepted, tuple(text[: accepted + 1].tolist()))


def work_of(plan: Plan) -> StepWork:
    kv_rows = attended = num_tokens = 0
    for e in plan.extensions:
        n = len(e.token_ids)
        num_tokens += n
        kv_rows += e.start + n
        attended += n * e.start + n * (n - 1) // 2
    return StepWork(num_tokens, len(plan.extensions), kv_rows, attended)


def _measured_work(num_tokens: int, context_len: int, rows_per_request: int) -> StepWork:
    requests = math.ceil(num_tokens / rows_per_request)
    return StepWork(num_tokens, requests, requests * context_len + num_tokens, num_tokens * context_len)


def measured_curve(
    target: SimulatedTarget, drafter: SimulatedDrafter, *, max_live: int, prefill_chunk: int
) -> CostCurve:
    """What a server finds at its start on this machine: the law at the sizes that it tries."""
    return _finished(
        measure_curve(
            target,
            drafter,
            verifier_info=target.info,
            drafter_info=drafter.info,
            max_live=max_live,
            max_step_tokens=prefill_chunk + max_live * (drafter.info.width + 1),
        )
    )


def exact_curve(target: SimulatedTarget, drafter: SimulatedDrafter, *, max_live: int, prefill_chunk: int) -> CostCurve:
    """The law at every size: what could be known at best."""
    width = drafter.info.width
    tokens = range(1, min(_EXACT_TOKENS, prefill_chunk + max_live * (width + 1)) + 1)
    contexts = [c for c in (64, 256, 1024, 4096) if c < target.info.max_model_len] or [1]
    requests, widths = range(1, max_live + 1), range(1, width + 1)
    verify_s = _finished(target.measure(tokens, contexts))
    draft_s = _finished(drafter.measure(requests, widths))
    points = CurvePoints(
        tokens=tuple(tokens),
        contexts=tuple(contexts),
        verify_s=tuple(tuple(row) for row in verify_s),
        requests=tuple(requests),
        widths=tuple(widths),
        draft_s=tuple(tuple(row) for row in draft_s),
    )
    return CostCurve(points, 0.0)


def _finished(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Its result. Simulated workers never wait, so it runs to its end at the first push, inside an event loop or not."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("a simulated worker waited")
