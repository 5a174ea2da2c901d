"""A real gateway over HTTP, in a thread, before an engine whose numbers a test sets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx
import uvicorn

from scheduler.errors import SchedulerLost
from scheduler.stats import SchedulerStats
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig


class ServedGateway:
    """`with ServedGateway(scheduler) as gateway:`; `gateway.stats` is what its engine says of itself, None that it is lost.
    port: to come back where another one was. others: further engine groups by name."""

    def __init__(
        self,
        scheduler: Any,
        config: GatewayConfig | None = None,
        port: int = 0,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        self.stats: SchedulerStats | None = SchedulerStats(verifier_alive=True, drafter_alive=True, draft_width=7)
        scheduler.snapshot = self._snapshot
        self._scheduler, self._config, self._others = scheduler, config or GatewayConfig(), others or {}
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _snapshot(self) -> SchedulerStats:
        if self.stats is None:
            raise SchedulerLost("it is gone")
        return self.stats

    def __enter__(self) -> ServedGateway:
        app = create_app({"0": self._scheduler, **self._others}, self._config)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        serving = self._server.serve(sockets=[self._socket])
        self._thread = threading.Thread(target=lambda: asyncio.run(serving), daemon=True)
        self._thread.start()
        self._await("/ready" if self._scheduler.ready else "/health")
        return self

    def _await(self, path: str) -> None:
        deadline = time.monotonic() + 60
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while time.monotonic() < deadline and client.get(path).status_code != 200:
                time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
