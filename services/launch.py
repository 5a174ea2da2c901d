"""Runs the server until it is told to stop: on Ray Serve, or in this one process without Ray.

Both answer on the same address with the same application, print one line when they are ready, and drain on SIGINT and
SIGTERM: no new requests, running streams finish within `gateway.drain_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from scheduler.errors import SettingsError
from services.settings import Settings

APPLICATION = "dspark"


class StartFailed(Exception):
    """The server could not start; the message is one line."""


def check_port(host: str, port: int) -> None:
    """Raises SettingsError when nothing can listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(f"gateway.port: cannot listen on {host}:{port}: {reason}; set another --port") from None


def check_files(settings: Settings) -> None:
    """Finds at once what a worker would only find after Ray has started."""
    from drafter.checkpoint import read_layer_ids

    settings.target_path()
    read_layer_ids(settings.drafter_checkpoint(), settings.cache_dir)


def ready_line(settings: Settings) -> str:
    host = settings.gateway.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"ready: {settings.model_name} on http://{shown}:{settings.gateway.port}/v1"


def say(line: str) -> None:
    print(line, flush=True)


def on_stop_signals(action: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: action())


def serve_with_ray(settings: Settings) -> None:
    """Starts Ray here, or joins the cluster that RAY_ADDRESS names."""
    check_port(settings.gateway.host, settings.gateway.port)
    check_files(settings)
    import ray

    from services.cluster import start_ray

    stop = threading.Event()
    failures: list[str] = []
    try:
        start_ray(settings)
        on_stop_signals(stop.set)
        say(f"starting {settings.model_name} (the first start converts weights and measures the cost curve)")
        deploying = threading.Thread(target=_deploy, args=(settings, failures), daemon=True)
        deploying.start()
        while deploying.is_alive() and not stop.is_set():
            deploying.join(0.2)
        if failures:
            raise StartFailed(failures[0])
        if not stop.is_set():
            say(ready_line(settings))
            stop.wait()
        say("draining")
    finally:
        _stop_ray(ray)


def _deploy(settings: Settings, failures: list[str]) -> None:
    """Runs in a thread, so that a stop signal is heard while models load. Returns when every replica is ready."""
    from ray import serve

    from services.app import build

    try:
        serve.start(http_options={"host": settings.gateway.host, "port": settings.gateway.port})
        serve.run(build(settings), name=APPLICATION, route_prefix="/")
        _await_ready(settings)
    except Exception as error:
        failures.append(_reason(error))


def _await_ready(settings: Settings) -> None:
    host = "127.0.0.1" if settings.gateway.host in ("0.0.0.0", "::") else settings.gateway.host
    with httpx.Client(base_url=f"http://{host}:{settings.gateway.port}", timeout=10) as client:
        for _ in range(600):
            response = client.get("/ready")
            if response.status_code == 200:
                return
            threading.Event().wait(0.1)
    raise StartFailed(f"not ready: {response.json().get('reason', response.status_code)}")


def _reason(error: Exception) -> str:
    """The line of a replica's traceback that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "SettingsError: " in line or line.partition(":")[0].endswith(("Error", "Lost"))]
    line = (named or lines or [type(error).__name__])[-1]
    return line.rpartition("SettingsError: ")[2] if "SettingsError: " in line else line


def _stop_ray(ray: Any) -> None:
    from ray import serve

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        serve.delete(APPLICATION)
    if not os.environ.get("RAY_ADDRESS"):
        with contextlib.suppress(Exception):
            serve.shutdown()
    ray.shutdown()


def serve_in_process(settings: Settings) -> None:
    """Gateway, scheduler and workers in this process, under uvicorn."""
    check_port(settings.gateway.host, settings.gateway.port)
    asyncio.run(_serve_in_process(settings))


async def _serve_in_process(settings: Settings) -> None:
    import uvicorn

    from services.engine import Engine
    from services.gateway.app import create_app
    from services.workers import launch_colocated

    engine = Engine(settings, launch_colocated)
    app = create_app(engine, settings.gateway_config())
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.gateway.host,
            port=settings.gateway.port,
            log_level="warning",
            timeout_graceful_shutdown=int(settings.gateway.drain_s),
        )
    )
    async with _starting(engine, settings, server) as starting:
        await server.serve()
    await engine.drain(0)
    await engine.stop()
    if starting.done() and not starting.cancelled() and (error := starting.exception()) is not None:
        raise error


@contextlib.asynccontextmanager
async def _starting(engine: Any, settings: Settings, server: Any) -> AsyncIterator[asyncio.Task[None]]:
    """The models load while the server already answers /health and says on /ready what it waits for."""

    async def start() -> None:
        try:
            await engine.start()
            say(ready_line(settings))
        except BaseException:
            server.should_exit = True
            raise

    task = asyncio.create_task(start())
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait({task})


def fail(message: str, status: int) -> int:
    print(f"dspark: {message}", file=sys.stderr)
    return status
