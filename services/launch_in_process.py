"""Runs the server in this one process, without Ray, until it is told to stop: gateway, scheduler and workers under uvicorn.

Drains and ends as services/launch.py says. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from typing import TYPE_CHECKING, Any

from scheduler.errors import SettingsError
from services.foreground import KILLING_SIGNAL, STOP_SIGNALS, Stopped
from services.launch import DRAINING, LAST_WORDS_S, STOPPED, ready_line, say
from services.logs import configure
from services.settings import Settings

if TYPE_CHECKING:
    from services.engine import Engine
    from services.gateway.app import Gateway

# beyond what _end_in_time takes: uvicorn's own way of ending a connection is a traceback
_MARGIN_S = 5.0


def serve_in_process(settings: Settings) -> None:
    """Gateway, scheduler and workers in this process, under uvicorn. Raises Stopped like serve_with_ray."""
    if settings.groups > 1:
        raise SettingsError(
            f"groups: one process is one engine group, not {settings.groups}; set groups to 1, or leave out --no-ray"
        )
    from uvicorn.loops.auto import auto_loop_factory

    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve_in_process(settings))


async def _serve_in_process(settings: Settings) -> None:
    """The models load while the server already answers /health and says on /ready what it waits for."""
    from services.engine import Engine
    from services.gateway.app import create_app
    from services.workers import launch_colocated

    configure("server", settings.log_config())
    engine = Engine(settings, launch_colocated, tell=lambda phase: say(phase) if phase else None)
    app = create_app(engine, settings.gateway_config())
    server = _server(app, settings)
    starting = asyncio.create_task(_start(engine, app.state.gateway, server, settings))
    stop = _StopInProcess(server)
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    ending = asyncio.create_task(_end_in_time(engine, stop, starting, settings.gateway.drain_s))
    await server.serve()
    ending.cancel()
    await asyncio.wait({ending})
    if not starting.done():
        starting.cancel()
    await asyncio.wait({starting})
    if starting.cancelled():
        raise Stopped(stop.numbers[0])
    await engine.stop()
    if (error := starting.exception()) is not None:
        raise error
    stop.raise_if_repeated()
    say(STOPPED)


class _StopInProcess:
    """Hears stop signals on the event loop: the first drains, the second does not wait for running streams, the third kills."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.numbers: list[int] = []
        self.told, self.hurried = asyncio.Event(), asyncio.Event()

    def __call__(self, number: int) -> None:
        self.numbers.append(number)
        if len(self.numbers) >= KILLING_SIGNAL:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.hurried if self.told.is_set() else self.told).set()
        self.server.should_exit = True

    def raise_if_repeated(self) -> None:
        if len(self.numbers) > 1:
            raise Stopped(self.numbers[1])


async def _end_in_time(engine: Engine, stop: _StopInProcess, starting: asyncio.Task[None], drain_s: float) -> None:
    """What still runs when the time is up ends with an error of its own, while there is a server that can say it; to a client
    that does not read even that, the connection is closed."""
    await stop.told.wait()
    if starting.done() and not stop.hurried.is_set():
        say(DRAINING)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.hurried.wait(), drain_s)
    await engine.stop()
    await asyncio.sleep(LAST_WORDS_S)
    for connection in list(stop.server.server_state.connections):
        connection.transport.abort()


async def _start(engine: Engine, gateway: Gateway, server: Any, settings: Settings) -> None:
    try:
        await engine.start()
        await gateway.loaded.wait()
        if gateway.refusal is not None:
            raise gateway.refusal
        say(ready_line(settings))
    except BaseException:
        server.should_exit = True
        raise


def _server(app: Any, settings: Settings) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again when it is done and so end the process half-way."""

        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()

    gateway = settings.gateway
    longest_s = math.ceil(gateway.drain_s + LAST_WORDS_S + _MARGIN_S)
    return Server(
        uvicorn.Config(app, host=gateway.host, port=gateway.port, log_config=None, timeout_graceful_shutdown=longest_s)
    )
