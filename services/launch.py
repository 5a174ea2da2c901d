"""Runs the server until it is told to stop: on Ray Serve, or in this one process without Ray.

Both answer on the same address with the same application, print one line when they are ready, and drain on SIGINT and
SIGTERM: no new requests, running streams finish within `gateway.drain_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx

from scheduler.errors import SettingsError
from services.access import check_exposure
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


def check_access(settings: Settings) -> None:
    """Raises SettingsError for keys that cannot be used, and for a public address without any."""
    gateway = settings.gateway
    check_exposure(gateway.host, settings.gateway_config().auth, allowed=gateway.allow_public_without_keys)


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
    check_access(settings)
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

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": settings.gateway.host, "port": settings.gateway.port})
        serve.run(build(settings), name=APPLICATION, route_prefix="/")
        _await_ready(settings)
    except Exception as error:
        failures.append(_reason(_replica_messages() or str(error)))


def _await_ready(settings: Settings) -> None:
    host = "127.0.0.1" if settings.gateway.host in ("0.0.0.0", "::") else settings.gateway.host
    with httpx.Client(base_url=f"http://{host}:{settings.gateway.port}", timeout=10) as client:
        for _ in range(600):
            response = client.get("/ready")
            if response.status_code == 200:
                return
            threading.Event().wait(0.1)
    raise StartFailed(f"not ready: {response.json().get('reason', response.status_code)}")


def _replica_messages() -> str:
    """What Serve knows of why deployments are not well, tracebacks included."""
    from ray import serve

    with contextlib.suppress(Exception):
        application = serve.status().applications[APPLICATION]
        return "\n".join(each.message for each in application.deployments.values() if each.message)
    return ""


def _reason(text: str) -> str:
    """The line of a traceback that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    refusals = [line.rpartition("SettingsError: ")[2] for line in lines if "SettingsError: " in line]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Lost|Fault)\b.*: ", line)]
    return (refusals or errors or lines or ["unknown reason"])[-1]


def _stop_ray(ray: Any) -> None:
    """Removing the application drains it. A Ray that was started here ends with this process."""
    from ray import serve

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        serve.delete(APPLICATION)
    ray.shutdown()


def serve_in_process(settings: Settings) -> None:
    """Gateway, scheduler and workers in this process, under uvicorn."""
    check_access(settings)
    check_port(settings.gateway.host, settings.gateway.port)
    asyncio.run(_serve_in_process(settings))


async def _serve_in_process(settings: Settings) -> None:
    """The models load while the server already answers /health and says on /ready what it waits for."""
    from services.engine import Engine
    from services.gateway.app import create_app
    from services.workers import launch_colocated

    engine = Engine(settings, launch_colocated)
    app = create_app(engine, settings.gateway_config())
    server = _server(app, settings)
    on_stop_signals(lambda: _ask_to_stop(server))

    async def start() -> None:
        try:
            await engine.start()
            await app.state.gateway.loaded.wait()
            say(ready_line(settings))
        except BaseException:
            server.should_exit = True
            raise

    starting = asyncio.create_task(start())
    await server.serve()
    if not starting.done():
        starting.cancel()
    await asyncio.wait({starting})
    await engine.stop()
    if not starting.cancelled() and (error := starting.exception()) is not None:
        raise error


def _server(app: Any, settings: Settings) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again when it is done and so end the process half-way."""

        def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
            return contextlib.nullcontext()

    gateway = settings.gateway
    drain_s = int(gateway.drain_s)
    return Server(
        uvicorn.Config(
            app, host=gateway.host, port=gateway.port, log_level="warning", timeout_graceful_shutdown=drain_s
        )
    )


def _ask_to_stop(server: Any) -> None:
    """The second time without waiting for running streams."""
    server.force_exit = server.should_exit
    server.should_exit = True


def fail(message: str, status: int) -> int:
    print(f"dspark: {message}", file=sys.stderr)
    return status
