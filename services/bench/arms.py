"""What is put under load: the engine in this process, whose planner is switched, or a running server, whose requests say for
themselves which planner they want. Both give one `Tally` per answer. Loopback or own servers only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from scheduler.errors import Failed
from services.bench.record import Watcher, recording
from services.bench.server import Server
from services.engine import Engine
from services.gateway.engine import EngineClient
from services.gateway.jobs import chat_job
from services.gateway.live_choices import LiveChoices
from services.gateway.loaded_model import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.stream import dump
from services.generate import Tally
from services.settings import Settings
from services.workers import launch_colocated

_IDLE_S = 60.0
_PAUSE_S = 0.1

AS_CONFIGURED = "server"
"""The arm of a running server that is left as it is."""


class Subject(Protocol):
    """model: as requests must call it."""

    model: str

    async def use(self, planner: str) -> None:
        """From now on requests run under this planner; returns when nothing runs any more."""
        ...

    async def ask(self, body: dict[str, Any]) -> Tally:
        """One chat completion, whole. Raises Overloaded when it is refused for load, other ServingErrors when it fails."""
        ...


class EngineSubject:
    """No HTTP: what differs between two arms is the planner. Requests go through the gateway's own checks."""

    def __init__(self, engine: Engine, client: EngineClient, model: LoadedModel, settings: Settings) -> None:
        self.model = model.card.name
        self._engine = engine
        self._client = client
        self._loaded = model
        self._config = settings.gateway_config()

    async def use(self, planner: str) -> None:
        deadline = time.monotonic() + _IDLE_S
        while (stats := await self._engine.snapshot()).num_live or stats.num_waiting:
            if time.monotonic() > deadline:
                raise Failed("the engine did not become idle between two arms")
            await asyncio.sleep(_PAUSE_S)
        await self._engine.set_planner(planner)
        await asyncio.sleep(_PAUSE_S)

    async def ask(self, body: dict[str, Any]) -> Tally:
        chat = parse_chat(dump(body).encode())
        job = await chat_job(chat, self._loaded, self._config, speculation_header=None, arrived_s=time.monotonic())
        tally = Tally()
        async with LiveChoices(self._client, job.requests) as live:
            while True:
                for _, deltas in await live.take():
                    for delta in deltas:
                        tally.add(delta)
                        if delta.finish_reason is not None:
                            return tally


class ServerSubject:
    def __init__(self, server: Server, model: str) -> None:
        self.model = model
        self._server = server
        self._planner = AS_CONFIGURED

    async def use(self, planner: str) -> None:
        self._planner = planner
        await asyncio.sleep(_PAUSE_S)

    async def ask(self, body: dict[str, Any]) -> Tally:
        if self._planner != AS_CONFIGURED:
            body = {**body, "speculation": {"mode": self._planner}}
        return await self._server.ask(body)


@asynccontextmanager
async def subject_of(settings: Settings, url: str | None, watchers: Sequence[Watcher]) -> AsyncIterator[Subject]:
    """The watchers hear of every step, in process only."""
    if url is not None:
        async with Server(url) as server:
            yield ServerSubject(server, settings.model.name or await server.served_model())
        return
    engine = Engine(settings, recording(launch_colocated, watchers))
    try:
        await engine.start()
        client = EngineClient(engine, settings.gateway_config())
        try:
            yield EngineSubject(engine, client, LoadedModel.from_card(await engine.card()), settings)
        finally:
            await client.stop()
    finally:
        await engine.stop()
