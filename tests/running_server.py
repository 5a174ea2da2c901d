"""A real server without Ray in a thread of this process: gateway, scheduler, target and drafter, on a loopback port."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from services.engine import Engine, Launch
from services.gateway.app import create_app
from services.settings import Settings, load_settings
from services.workers import launch_colocated

T = TypeVar("T")
_LOOK_S = 0.05


def small_settings(target: Path, drafter: str, cache_dir: Path, **sections: dict[str, Any]) -> Settings:
    """Everything small, in float32, and with the books checked after every step."""
    args: dict[str, Any] = {
        "model": {"path": str(target), "name": "tiny", "dtype": "float32", "device": "cpu"},
        "drafter": {"checkpoint": drafter, "dtype": "float32", "device": "cpu"},
        "scheduler": {"planner": "fixed:7", "check_integrity": True},
        "gateway": {"speculation_metrics": "detailed", "access_log": {"to": "off"}},
        "placement": "colocated",
        "threads": 1,
        "cache_dir": str(cache_dir),
    }
    for name, values in sections.items():
        args[name] = {**args.get(name, {}), **values}
    return load_settings(args=args)


def _slowness() -> float:
    """How much longer a computation takes than it computes: 1 on an idle machine."""
    wall, own = time.monotonic(), time.thread_time()
    while time.thread_time() - own < 0.05:
        pass
    return max(1.0, (time.monotonic() - wall) / (time.thread_time() - own))


class RunningServer:
    """`with RunningServer(settings) as server:`; `server.url` ends in /v1. `server.ask(coroutine)` runs it on the server's
    own event loop, where its state may be read."""

    engine: Engine
    app: FastAPI

    def __init__(self, settings: Settings, launch: Launch = launch_colocated) -> None:
        self._settings, self._launch = settings, launch
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self._started.result(300)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        self._socket.close()

    def ask(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def books(self) -> dict[str, int]:
        """What must be the same after a request as before it: places, blocks in use by requests, inboxes, tasks."""
        stats = await self.engine.snapshot()
        actor = self.engine.actor
        assert actor._loop is not None
        residency = actor._loop.core.residency
        return {
            "live": stats.num_live,
            "waiting": stats.num_waiting,
            "blocks_in_use": sum(live.num_blocks for live in residency.live.values()),
            "subscriber_of": len(actor._subscriber_of),
            "inboxes": self.app.state.gateway.client.num_live,
            "background": self.app.state.gateway.client.num_background,
            "tasks": len(asyncio.all_tasks()),
        }

    def quiet_within(self, before: dict[str, int], seconds: float) -> dict[str, int]:
        """The books once they are those of `before`, or as they are after `seconds`. Tasks may be fewer. Seconds are those
        of a machine of our own: where others get most of it, they are longer, and one that stands still lets none pass."""
        for _ in range(math.ceil(seconds * _slowness() / _LOOK_S)):
            now = self.ask(self.books())
            if all(now[name] <= before[name] if name == "tasks" else now[name] == before[name] for name in before):
                break
            time.sleep(_LOOK_S)
        return now

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(self._settings, self._launch)
        try:
            await self.engine.start()
            self.app = create_app(self.engine, self._settings.gateway_config())
            self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
            serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            await self.app.state.gateway.loaded.wait()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        await serving
        await self.engine.stop()
