"""A target and a drafter of a few lines that keep real caches, so that a wrong block table, a stale block or a missing
context row changes the tokens or raises. And the slow twin: plain decoding without any of it.

A KV row is the hash of all tokens up to it, computed from the row before it *as the cache has it*; the next token is a
function of the last row. Whoever reads another request's row therefore goes on with another request's text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.core import PrefixScheduler
from scheduler.errors import DrafterLost, VerifierLost
from scheduler.ports import ROWS_PER_REQUEST
from scheduler.throughput import CostCurve, CurvePoints
from scheduler.wire import (
    Delta,
    Draft,
    DraftAsk,
    DrafterInfo,
    Extension,
    Plan,
    Request,
    SamplingParams,
    Verdict,
    VerifierInfo,
)

VOCAB = 50
EMPTY = -1
START = 17


def chain(row: int, token: int) -> int:
    """The row after `row` when `token` follows."""
    return (row * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def next_token(row: int, output_index: int, params: SamplingParams) -> int:
    """The target's law: one token. Stop ids are masked below min_tokens, as the verifier does it."""
    token = (row >> 20) % VOCAB
    while output_index < params.min_tokens and token in params.stop_ids:
        token = (token + 1) % VOCAB
    return token


def row_of(tokens: Iterable[int]) -> int:
    row = START
    for token in tokens:
        row = chain(row, token)
    return row


def plain(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What the request must be answered, token by token."""
    row = row_of(prompt)
    output: list[int] = []
    while len(output) < params.max_tokens:
        token = next_token(row, len(output), params)
        output.append(token)
        if token in params.stop_ids and len(output) > params.min_tokens:
            break
        row = chain(row, token)
    return output


class Rows:
    """One cache: what was written at each slot, with its position and token."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.row = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)
        self.token = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)
        self.position = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)

    def slot(self, blocks: np.ndarray, position: int) -> int:
        block = int(blocks[position // self.block_size])
        assert block != 0, "block 0 was handed out"
        return block * self.block_size + position % self.block_size

    def write(self, slot: int, position: int, token: int, row: int) -> None:
        self.row[slot], self.token[slot], self.position[slot] = row, token, position

    def read(self, blocks: np.ndarray, length: int, first: int = 0) -> int:
        """The row of the context's last token, having checked every row before it from position `first` on."""
        row = START
        for position in range(first, length):
            slot = self.slot(blocks, position)
            assert self.position[slot] == position, f"position {position} holds {self.position[slot]}"
            row = chain(row, int(self.token[slot])) if position == 0 or position > first else int(self.row[slot])
            assert self.row[slot] == row, f"the row at position {position} follows other tokens"
        return row


@dataclass
class Life:
    """One life of a worker; what it handed out cannot be read after it has died."""

    over: bool = False


@dataclass(frozen=True)
class Committed:
    """Features: (slot, position, token, row) of every committed row, kept by the worker that made them."""

    rows: tuple[tuple[int, int, int, int], ...]
    life: Life


@dataclass
class ToyVerifier:
    """scheduler.ports.Verifier. `before_verify` may raise, sleep or look; `dead` makes every call fail and the cache forget."""

    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 128
    before_verify: Callable[[Plan], object] | None = None
    dead: bool = False
    fingerprint: str = "toy"
    verify_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    num_describes: int = 0

    def __post_init__(self) -> None:
        self.cache = Rows(self.num_blocks, self.block_size)
        self.life = Life()
        self.num_layers_done = 0

    def info(self) -> VerifierInfo:
        return VerifierInfo(
            self.num_blocks, self.block_size, self.max_model_len, VOCAB, (1,), "cpu", "float32", self.fingerprint, 8
        )

    def die(self) -> None:
        self.dead = self.life.over = True
        self.life = Life()
        self.cache = Rows(self.num_blocks, self.block_size)

    async def progress(self) -> int:
        return self.num_layers_done

    async def describe(self) -> VerifierInfo:
        self.num_describes += 1
        if self.dead:
            raise VerifierLost("the toy target is dead")
        return self.info()

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Committed | None]:
        if self.dead:
            raise VerifierLost("the toy target is dead")
        if self.before_verify is not None and asyncio.iscoroutine(waiting := self.before_verify(plan)):
            await waiting
        await asyncio.sleep(self.verify_s)
        if self.dead:
            raise VerifierLost("the toy target is dead")
        return self.verify_now(plan)

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return [[0.01 + 0.001 * n + 1e-6 * context for n in num_tokens] for context in context_lens]

    def verify_now(self, plan: Plan) -> tuple[list[Verdict], Committed | None]:
        self.plans.append(plan)
        written: set[int] = set()
        committed: list[tuple[int, int, int, int]] = []
        verdicts = [self._extend(e, written, committed) for e in plan.extensions]
        return verdicts, Committed(tuple(committed), self.life) if plan.capture else None

    def _extend(self, e: Extension, written: set[int], committed: list[tuple[int, int, int, int]]) -> Verdict:
        assert len(e.token_ids) > e.num_draft >= 0 and (e.samples or e.num_draft == 0)
        assert len(e.block_ids) * self.block_size >= e.start + len(e.token_ids), "the table is too short"
        assert e.start + len(e.token_ids) <= self.max_model_len, "rows past the model's context"
        row = self.cache.read(e.block_ids, e.start)
        num_known = len(e.token_ids) - e.num_draft
        output: list[int] = []
        for i, token in enumerate(e.token_ids.tolist()):
            position = e.start + i
            slot = self.cache.slot(e.block_ids, position)
            assert slot not in written, "two requests write one slot"
            written.add(slot)
            row = chain(row, token)
            self.cache.write(slot, position, token, row)
            right = i < num_known or (len(output) == i - num_known + 1 and output[-1] == token)
            if right:
                committed.append((slot, position, token, row))
            if e.samples and right and i >= num_known - 1:
                output.append(next_token(row, e.output_index + len(output), e.params))
        if not e.samples:
            return Verdict(e.request_id, 0, ())
        return Verdict(e.request_id, len(output) - 1, tuple(output))


def always(_row: int, _k: int) -> bool:
    return True


def never(_row: int, _k: int) -> bool:
    return False


def sometimes(row: int, k: int) -> bool:
    return (row >> 33) % 10 < 7 - k // 2


@dataclass
class ToyDrafter:
    """scheduler.ports.Drafter. `knows(row, k)`: whether draft k after that row is the target's own token.

    confidence: None, or a function like `knows` that gives the claimed probability. `faults`: broken contexts it met.
    """

    verifier: ToyVerifier
    width: int = 5
    variable_width: bool = True
    knows: Callable[[int, int], bool] = always
    confidence: Callable[[int, int], float] | None = None
    max_len: int = 1 << 20
    dead: bool = False
    layers: tuple[int, ...] = (1,)
    faults: list[str] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    before_propose: Callable[[Sequence[DraftAsk]], object] | None = None

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.cache = Rows(self.verifier.num_blocks, self.verifier.block_size)

    def die(self) -> None:
        self.dead = True
        self.forget()

    def info(self) -> DrafterInfo:
        return DrafterInfo(
            "toy",
            self.width,
            self.variable_width,
            self.confidence is not None,
            self.max_len,
            self.layers,
            "toy-drafter",
        )

    async def progress(self) -> int:
        if self.dead:
            raise DrafterLost("the toy drafter is dead")
        return 0

    async def describe(self) -> DrafterInfo:
        if self.dead:
            raise DrafterLost("the toy drafter is dead")
        return self.info()

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Committed]) -> list[Draft]:
        if self.dead:
            raise DrafterLost("the toy drafter is dead")
        if self.before_propose is not None and asyncio.iscoroutine(waiting := self.before_propose(asks)):
            await waiting
        await asyncio.sleep(0)
        if self.dead:
            raise DrafterLost("the toy drafter died over its work")
        return self.propose_now(asks, width, features)

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return [[0.002 + 0.0001 * r * w for w in widths] for r in num_requests]

    def propose_now(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Committed]) -> list[Draft]:
        self.calls.append((len(asks), width, len(features)))
        for committed in features:
            assert not committed.life.over, "these features went with the worker that made them"
            for slot, position, token, row in committed.rows:
                self.cache.write(slot, position, token, row)
        return [self._draft(ask, width) for ask in asks]

    def _draft(self, ask: DraftAsk, width: int) -> Draft:
        assert 0 < width <= self.width and ask.start <= self.max_len
        assert ask.output_index > 0, "the anchor must be a generated token"
        if self.layers:
            try:
                assert ask.context_from % self.cache.block_size == 0
                row = self.cache.read(ask.block_ids, ask.start, ask.context_from)
            except AssertionError as fault:
                self.faults.append(f"{ask.request_id}: {fault}")
                raise
        else:
            row = self.verifier.cache.read(ask.block_ids, ask.start)
        row = chain(row, ask.anchor_id)
        tokens, confidence = [], []
        for k in range(width):
            right = next_token(row, ask.output_index + k, ask.params)
            token = right if self.knows(row, k) else (right + 1) % VOCAB
            tokens.append(token)
            confidence.append(self.confidence(row, k) if self.confidence is not None else 0.0)
            row = chain(row, token)
        return Draft(
            ask.request_id,
            np.array(tokens, dtype=np.int32),
            np.array(confidence, dtype=np.float32) if self.confidence is not None else None,
        )


def flat_curve(
    *, width: int = 5, fixed_s: float = 0.02, token_s: float = 1e-5, draft_s: float = 1e-3, max_live: int = 64
) -> CostCurve:
    """A step costs fixed_s + tokens * token_s whatever its context; a draft costs draft_s whatever its size."""
    tokens = (1, 64, 256)
    return CostCurve(
        CurvePoints(
            tokens=tokens,
            contexts=(64,),
            verify_s=(tuple(fixed_s + n * token_s for n in tokens),),
            requests=(1, max_live),
            widths=(1, width),
            draft_s=((draft_s, draft_s), (draft_s, draft_s)),
        ),
        measured_at=0.0,
    )


@dataclass
class Bench:
    """A PrefixScheduler with toy workers, driven step by step in the test's own thread."""

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    verifier: ToyVerifier = field(default_factory=ToyVerifier)
    drafter: ToyDrafter | None = None
    curve: CostCurve | None = None

    def __post_init__(self) -> None:
        info = self.drafter.info() if self.drafter else None
        self.core = PrefixScheduler(self.config, self.verifier.info(), info, self.curve)
        self.now = 0.0
        self.deltas: dict[str, list[Delta]] = {}
        self.features: list[Committed] = []

    def add(self, name: str, prompt: Sequence[int], *, priority: int = 0, **params: object) -> None:
        sampling = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
        self.core.add(Request(name, tuple(prompt), sampling, priority=priority), self.now)

    def cancel(self, name: str) -> None:
        if (delta := self.core.cancel(name)) is not None:
            self.collect([delta])

    def step(
        self, *, during_draft: Callable[[], None] | None = None, during_verify: Callable[[], None] | None = None
    ) -> None:
        self.now += 1.0
        self.collect(self.core.expire(self.now))
        call = self.core.choose_drafts()
        drafts: list[Draft] = []
        if self.drafter is not None and call.asks:
            drafts = self.drafter.propose_now(call.asks, call.width, self.features)
            self.features = []
            self.core.check_drafts(call, drafts)
        if during_draft is not None:
            during_draft()
        plan = self.core.plan(drafts, self.now)
        assert self.core.plan(drafts, self.now) is plan
        verdicts, features = self.verifier.verify_now(plan)
        if features is not None:
            self.features.append(features)
        if during_verify is not None:
            during_verify()
        self.collect(self.core.apply(verdicts))
        assert self.core.last_step is not None
        self.core.record(self.core.last_step)
        self.core.check_integrity()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def collect(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)

    def output(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, []) for token in delta.token_ids]

    def ending(self, name: str) -> Delta:
        """The request's last delta, the only one that ends it."""
        last = [delta for delta in self.deltas[name] if delta.finish_reason is not None]
        assert len(last) == 1 and last[0] is self.deltas[name][-1], f"{name} ended {len(last)} times"
        return last[0]
