"""The engine groups behind one gateway: which of them a request goes to, and one face for all of them.

Every group serves the same model. A prompt goes where its beginning went before, for the prefix cache, unless that group
has noticeably more of this gateway's requests than another. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from scheduler.errors import Overloaded, SchedulerLost, ServingError, ShuttingDown
from scheduler.stats import SchedulerStats
from scheduler.wire import Request
from services.gateway.config import GatewayConfig
from services.gateway.engine import EngineClient
from services.gateway.subscription import Inbox, Scheduler, Subscription
from services.model_card import ModelCard

T = TypeVar("T")

# Tokens of a prompt that decide which group it prefers.
_PREFIX = 64
# Requests by which the preferred group may have more than the one with the fewest.
_MOST_AHEAD = 4
# How long a group that was lost is tried last.
_SHUNNED_S = 5.0
# What another group may be able to do.
_ELSEWHERE = (Overloaded, SchedulerLost, ShuttingDown)


# What answers are made with: one engine or several.
Engines: TypeAlias = "EngineClient | EngineGroups"


class EngineGroups:
    """`schedulers`: by the group's name, as metrics show it."""

    def __init__(self, schedulers: Mapping[str, Scheduler], config: GatewayConfig) -> None:
        self._clients = {name: EngineClient(scheduler, config) for name, scheduler in schedulers.items()}
        self._lost_s: dict[str, float] = {}

    @property
    def num_live(self) -> int:
        return sum(client.num_live for client in self._clients.values())

    @property
    def num_background(self) -> int:
        """Cancels under way."""
        return sum(client.num_background for client in self._clients.values())

    def num_open(self) -> dict[str, int]:
        """This gateway's requests at each group."""
        return {name: client.num_live for name, client in self._clients.items()}

    async def card(self) -> ModelCard:
        """Of whichever group is ready first; raises the first group's SchedulerLost while none is."""
        return await _first([client.card() for client in self._clients.values()])

    async def check_health(self) -> None:
        """Passes while one group is well."""
        await _first([client.check_health() for client in self._clients.values()])

    async def snapshots(self) -> dict[str, SchedulerStats | None]:
        """By group; None where it does not answer."""
        found = await asyncio.gather(*(client.snapshot() for client in self._clients.values()), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, ServingError):
                raise each
        return {
            name: stats if isinstance(stats, SchedulerStats) else None
            for name, stats in zip(self._clients, found, strict=True)
        }

    async def submit(self, request: Request, inbox: Inbox) -> Subscription:
        """Hands the request to the group that suits it best; to another one when that has no room or is not there."""
        *others, last = self._order(request.prompt_ids)
        for name in others:
            try:
                return await self._submit_to(name, request, inbox)
            except _ELSEWHERE:
                continue
        return await self._submit_to(last, request, inbox)

    async def _submit_to(self, name: str, request: Request, inbox: Inbox) -> Subscription:
        try:
            return await self._clients[name].submit(request, inbox)
        except (SchedulerLost, ShuttingDown):
            self._lost_s[name] = time.monotonic()
            raise

    def _order(self, prompt_ids: Sequence[int]) -> list[str]:
        """Best first."""
        if len(self._clients) == 1:
            return list(self._clients)
        now, loads = time.monotonic(), self.num_open()
        shunned = {name for name, lost_s in self._lost_s.items() if now - lost_s < _SHUNNED_S}
        fewest = min(load for name, load in loads.items() if name not in shunned or len(shunned) == len(loads))

        def worse(name: str) -> tuple[bool, bool, int, bytes]:
            ahead = loads[name] - fewest > _MOST_AHEAD
            return name in shunned, ahead, loads[name] if ahead else 0, _liking(name, prompt_ids)

        return sorted(loads, key=worse)

    async def queue_position(self, request_id: str) -> int | None:
        """0: it runs; n: the n-th of those waiting; None: nobody knows."""
        for client in self._clients.values():
            if client.has(request_id):
                return await client.queue_position(request_id)
        return None

    def cancel_later(self, request_id: str, submitted: asyncio.Task[Subscription]) -> None:
        """One cancel in the background, at whichever group the request turns out to be: any client can send it."""
        next(iter(self._clients.values())).cancel_later(request_id, submitted)

    async def stop(self) -> None:
        await asyncio.gather(*(client.stop() for client in self._clients.values()))


async def _first(calls: Sequence[Coroutine[Any, Any, T]]) -> T:
    """The result of the first that succeeds; the error of the first in order when none does."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        for done in asyncio.as_completed(tasks):
            with contextlib.suppress(ServingError):
                return await done
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _liking(name: str, prompt_ids: Sequence[int]) -> bytes:
    """Less is liked more. The same for every gateway, and a group more or less moves no other's prompts."""
    ids = prompt_ids[:_PREFIX]
    return hashlib.blake2b(struct.pack(f"{len(ids)}q", *ids), key=name.encode(), digest_size=8).digest()
