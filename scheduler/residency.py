"""Decides who holds KV blocks and what known tokens each computes this step: admission, chunked prefill, preemption.

Must not know drafts, except that what it leaves free may be used for them. Policy: by rank (scheduler/live.py), which is first
come, first served among equal priorities. Places are given in that order, and a place is kept until the request ends; only when
blocks run out the resident of the last rank loses its own and waits again. So the first in rank always advances, and since ranks
of later arrivals grow without end, nothing waits for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.errors import InternalFault
from scheduler.live import Live, rank_of
from scheduler.tables import BlockTables
from scheduler.waiting import WaitingQueue


class Chunk(NamedTuple):
    """`num_tokens` known tokens of `live`, from its first uncomputed one on, run through the target this step."""

    live: Live
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    chunks: list[Chunk]
    admitted: list[Live]
    num_preempted: int


class Residency:
    def __init__(self, config: SchedulerConfig, tables: BlockTables) -> None:
        self.tables = tables
        self.live: dict[str, Live] = {}
        self.waiting = WaitingQueue(config.max_waiting, config.max_wait_s)
        self._config = config
        self._slots = list(range(config.max_live - 1, -1, -1))
        self._next_deadline_s = math.inf
        self._num_arrived = 0
        # The head found no room with this many blocks available; until there are more, asking again is a waste.
        self._blocked: tuple[str, int] | None = None

    def get(self, request_id: str) -> Live | None:
        return self.live.get(request_id) or self.waiting.get(request_id)

    def everyone(self) -> list[Live]:
        return [*self.live.values(), *self.waiting]

    def add(self, live: Live, now: float) -> None:
        """Raises Overloaded."""
        self.waiting.check_room(now, num_places=self._config.max_live - len(self.live))
        self._num_arrived += 1
        live.rank = (live.arrival_s - live.request.priority * self._config.priority_aging_s, self._num_arrived)
        self.waiting.push(live, now)
        self._next_deadline_s = min(self._next_deadline_s, live.deadline_s)

    def remove(self, live: Live) -> None:
        """The request is over; its blocks are given back."""
        request_id = live.request.request_id
        if self.waiting.remove(request_id) is None and self.live.pop(request_id, None) is not None:
            self._vacate(live)

    def members(self, cohort: int | None) -> list[Live]:
        """Residents of that cohort, oldest first; all where None."""
        return [live for live in self.live.values() if cohort is None or live.cohort == cohort]

    def balance(self, cohort: int) -> None:
        """Hands the youngest of this cohort to the other one, until they differ by one at most."""
        members = self.members(cohort)
        surplus = max(0, len(members) - (len(self.live) + 1) // 2)
        for live in members[len(members) - surplus :]:
            live.cohort = 1 - cohort

    def expired(self, now: float) -> list[Live]:
        if now < self._next_deadline_s:
            return []
        everyone = self.everyone()
        self._next_deadline_s = min((r.deadline_s for r in everyone if r.deadline_s > now), default=math.inf)
        return [r for r in everyone if r.deadline_s <= now]

    @property
    def may_admit(self) -> bool:
        """Someone waits, there is a place, and what kept the head out, if anything, has changed."""
        head = self.waiting.head
        return (
            head is not None
            and len(self.live) < self._config.max_live
            and self._blocked != (head.request.request_id, self.tables.num_available)
        )

    def prefill_backlog(self, cohort: int | None = None) -> int:
        """Prompt tokens that the cohort's next step will compute; an estimate, made before admission."""
        backlog = sum(live.lag for live in self.members(cohort) if not live.decodes)
        if self.may_admit and self.waiting.head is not None:
            backlog += self.waiting.head.lag
        return min(backlog, self._config.prefill_chunk)

    def schedule(self, now: float, budget: int, cohort: int | None = None, *, heals: bool = False) -> Schedule:
        """The cohort's known tokens for this step, in the order of ranks, each with its blocks. budget: most prompt tokens.
        heals: see BlockTables.restore.

        Who is admitted joins the cohort; of two, the one that is not larger admits.
        """
        num_preempted = 0
        chunks: list[Chunk] = []
        for live in sorted(self.members(cohort), key=rank_of):
            if live.request.request_id not in self.live:
                break  # it was preempted below, and so were all after it
            num_tokens = 1 if live.lag == 1 else min(live.lag, budget)
            if num_tokens == 0:
                continue
            num_preempted += self._make_room(live, live.num_computed + num_tokens)
            if live.request.request_id in self.live:
                chunks.append(Chunk(live, num_tokens))
                budget -= num_tokens if live.lag > 1 else 0
        smaller = cohort is None or 2 * len(self.members(cohort)) <= len(self.live)
        admitted = self._admit(chunks, budget, now, heals) if smaller and not num_preempted else []
        for live in admitted:
            live.cohort = cohort if cohort is not None else live.slot % 2
        return Schedule(chunks, admitted, num_preempted)

    def evict_all(self) -> None:
        """Every resident loses its rows and waits to be recomputed."""
        while self.live:
            self._preempt_last()

    def check_integrity(self) -> None:
        """Raises InternalFault where blocks or slots do not add up, or someone waiting still holds either."""
        residents = list(self.live.values())
        self.tables.check_integrity(residents)
        if sorted([*self._slots, *(live.slot for live in residents)]) != list(range(self._config.max_live)):
            raise InternalFault("a slot is held twice or lost")
        if any(live.num_blocks or live.num_computed or live.slot >= 0 for live in self.waiting):
            raise InternalFault("a waiting request holds blocks or a slot")

    def abandon(self, tables: BlockTables) -> list[Live]:
        """Begins anew with `tables`; returns the former residents, who are nobody's now. Gives nothing back, so it works when
        the books are wrong."""
        former = list(self.live.values())
        self.live = {}
        self.tables = tables
        self._slots = list(range(self._config.max_live - 1, -1, -1))
        self._blocked = None
        return former

    def _make_room(self, live: Live, num_rows: int) -> int:
        """Gives `live` its blocks, preempting as many of the last in rank as that takes, at worst itself; returns how many."""
        num_preempted = 0
        while live.request.request_id in self.live and not self.tables.grow(live, num_rows):
            self._preempt_last()
            num_preempted += 1
        return num_preempted

    def _preempt_last(self) -> None:
        victim = max(self.live.values(), key=rank_of)
        del self.live[victim.request.request_id]
        self._vacate(victim)
        self.waiting.put_back(victim)

    def _vacate(self, live: Live) -> None:
        self.tables.release(live)
        self._slots.append(live.slot)
        live.slot = -1
        self._blocked = None

    def _admit(self, chunks: list[Chunk], budget: int, now: float, heals: bool) -> list[Live]:
        """Seats those who wait while there are places, prefill budget and blocks; extends `chunks`."""
        admitted: list[Live] = []
        while budget > 0 and self.may_admit and self._seat(heals):
            live = self.waiting.pop(now)
            self.live[live.request.request_id] = live
            live.slot = self._slots.pop()
            num_tokens = min(live.lag, budget)
            self.tables.grow(live, live.num_computed + num_tokens)
            budget -= num_tokens
            chunks.append(Chunk(live, num_tokens))
            admitted.append(live)
        return admitted

    def _seat(self, heals: bool) -> bool:
        """Gives the head its cached prefix if there is room for all its known tokens, with a block to spare for each resident;
        without that margin the next step would preempt it again."""
        live = self.waiting.head
        assert live is not None
        available = self.tables.num_available
        self.tables.restore(live, heals=heals)
        missing = self.tables.blocks_for(live.num_known) - live.num_blocks
        if missing + len(self.live) <= self.tables.num_available or not self.live:
            return True
        self.tables.release(live)
        self._blocked = (live.request.request_id, available)
        return False
