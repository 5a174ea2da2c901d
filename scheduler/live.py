"""What is known of one request while it waits and runs: counts, tokens, block table. Must not know other requests.

A request has no phase. `lag` = num_known - num_computed says everything: prefill, prefix hit, decoding and recomputation after
a preemption differ only in that number, which is at least 1 because the newest token's KV row is never computed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.errors import InternalFault
from scheduler.prefix import ROOT
from scheduler.wire import DraftAsk, IntArray, Request, SamplingParams, Usage

LEAST_CONTEXT = 8
"""Rows from which on a drafter that lacks what stands before them is worth asking. The demo drafter (greedy, chat, code and math,
24 prompts each) gets 2.93 tokens a round from its whole context, 2.92 from the last 128 rows, 2.79 from 64, 2.64 from 32, 2.50
from 16 and 2.37 from 8, whole blocks of 16 counted."""

ENOUGH_CONTEXT = 128
"""Rows from which on more context is worth nothing; see there."""


@dataclass(slots=True, eq=False)
class Live:
    """token_ids: [num_prompt + max_tokens], the first num_known are valid and never change.
    block_table: as long as it can ever get, the first num_blocks are valid.
    num_chained: leading blocks of the table that belong to the prefix cache; `chain` is that prefix's name there; publishes: its
        further blocks will too.
    context_from: the drafter has its rows from there on, or will have; the beginning of a block (scheduler/tables.py).
    cached_tokens: prompt tokens that came from the prefix cache when it was first admitted.
    slot: its row in the acceptance estimates while it holds blocks. cohort: 0 or 1, which of two steps in flight it is in.
    rank: its place among all requests, less is earlier: (arrival less what its priority is worth in seconds, number of its
        arrival). It never changes, so whoever waits overtakes later arrivals of a higher priority in time.
    """

    request: Request
    arrival_s: float
    deadline_s: float
    token_ids: IntArray
    block_table: IntArray
    num_prompt: int
    num_known: int
    num_computed: int = 0
    num_blocks: int = 0
    num_chained: int = 0
    chain: int = ROOT
    publishes: bool = True
    context_from: int = 0
    slot: int = -1
    rank: tuple[float, int] = (0.0, 0)
    cohort: int = 0
    cached_tokens: int = 0
    admitted_s: float | None = None
    cancelled: bool = False

    @property
    def lag(self) -> int:
        return self.num_known - self.num_computed

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Output tokens it may still get."""
        return len(self.token_ids) - self.num_known

    @property
    def decodes(self) -> bool:
        """Its newest token, one that was generated, is the only one without a KV row."""
        return self.num_known - self.num_computed == 1 and self.num_known > self.num_prompt

    @property
    def has_context(self) -> bool:
        """The drafter knows enough of what stands before the newest token."""
        return self.context_from == 0 or self.num_computed - self.context_from >= LEAST_CONTEXT

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_output, self.cached_tokens)

    @property
    def draft_params(self) -> SamplingParams:
        """Without the grammar: a drafter cannot follow it, and its text is long."""
        params = self.request.params
        return params if params.grammar is None else replace(params, grammar=None)

    def append(self, token_id: int) -> None:
        self.token_ids[self.num_known] = token_id
        self.num_known += 1

    def blocks(self) -> IntArray:
        """A copy of the valid table: what a plan carries must not change under it."""
        return self.block_table[: self.num_blocks].copy()

    def ask(self, *, with_tokens: bool) -> DraftAsk:
        params = self.draft_params
        return DraftAsk(
            request_id=self.request.request_id,
            anchor_id=int(self.token_ids[self.num_known - 1]),
            start=self.num_computed,
            block_ids=self.blocks(),
            params=params,
            output_index=self.num_output,
            context_ids=self.token_ids[: self.num_known] if with_tokens or params.needs_history else None,
            context_from=self.context_from,
        )

    def forget_rows(self) -> None:
        """It holds no blocks any more: every row must be computed again, no token is lost."""
        self.num_computed = self.num_blocks = self.num_chained = self.context_from = 0
        self.chain, self.publishes = ROOT, True

    def check_integrity(self, block_size: int) -> None:
        name = self.request.request_id
        if not 0 <= self.num_computed < self.num_known <= len(self.token_ids):
            raise InternalFault(f"{name}: {self.num_computed} rows for {self.num_known} tokens")
        if self.num_computed > self.num_blocks * block_size or self.num_chained > self.num_blocks:
            raise InternalFault(f"{name}: {self.num_computed} rows in {self.num_blocks} blocks of {block_size}")
        if self.num_known < self.num_prompt:
            raise InternalFault(f"{name}: part of the prompt is missing")


def rank_of(live: Live) -> tuple[float, int]:
    return live.rank


def new_live(request: Request, *, now: float, deadline_s: float, block_size: int) -> Live:
    num_prompt = len(request.prompt_ids)
    capacity = num_prompt + request.params.max_tokens
    token_ids = np.empty(capacity, dtype=np.int32)
    token_ids[:num_prompt] = request.prompt_ids
    return Live(
        request=request,
        arrival_s=now,
        deadline_s=deadline_s,
        token_ids=token_ids,
        block_table=np.zeros(-(-capacity // block_size), dtype=np.int32),
        num_prompt=num_prompt,
        num_known=num_prompt,
    )
