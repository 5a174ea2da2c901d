"""Runs the server on Ray Serve until it is told to stop; services/launch_in_process.py is the same without Ray.

Both answer on the same address with the same application, print one line when they are ready, and drain on SIGINT and
SIGTERM: no new requests, running streams finish within `gateway.drain_s`; a second signal ends them with an error event and
raises Stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httpx

from scheduler.errors import Failed, SettingsError
from services.access import check_exposure
from services.foreground import Stopped, on_stop_signals, print_to_nobody
from services.gateway.request_trace import check_tracing
from services.ingress import described, why_haproxy_failed
from services.settings import Settings

APPLICATION = "dspark"
DRAINING, STOPPED = "draining", "stopped"
_CONNECT_S = 5.0
_LOOK_S = 1.0
_WATCH_S = 0.2
_REMOVAL_S = 20.0
_POLL_S = 0.1
_CUT_S = 2.0
_SHUTDOWN_S = 10.0
LAST_WORDS_S = 3.0
# the names that Serve gives to its replicas' actors
_GATEWAYS = f"SERVE_REPLICA::{APPLICATION}#Gateway#"


def check_cluster() -> None:
    """Raises SettingsError when nobody listens where RAY_ADDRESS points: Ray would go on trying for minutes, deaf to signals."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        raise SettingsError(
            f"RAY_ADDRESS {address!r}: no Ray answers there; start a cluster (HOST:PORT), or unset it to run Ray here"
        ) from None


def check_access(settings: Settings) -> None:
    """Raises SettingsError for keys that cannot be used, for a public address without any, and for traces without the extra."""
    gateway, config = settings.gateway, settings.gateway_config()
    check_exposure(gateway.host, config.auth, allowed=gateway.allow_public_without_keys)
    check_tracing(config.tracing)


def check_files(settings: Settings) -> None:
    """Finds at once what a worker would only find after Ray has started."""
    from drafter.checkpoint import read_layer_ids

    path = settings.target_path()
    if path.startswith(("/", "./", "../", "~")) and not Path(os.path.expanduser(path)).exists():
        raise SettingsError(f"model.path: {path} does not exist; give a folder, a GGUF file or a hub id")
    read_layer_ids(settings.drafter_checkpoint(), settings.cache_dir)


def ready_line(settings: Settings) -> str:
    return f"ready: {settings.model_name} on {local_url(settings)}/v1"


def local_url(settings: Settings) -> str:
    host = settings.gateway.host
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{local}:{settings.gateway.port}"


def say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        print_to_nobody()  # the server serves on


def serve_with_ray(settings: Settings) -> None:
    """Starts Ray here, or joins the cluster that RAY_ADDRESS names. Returns when it was told to stop and has drained; raises
    Stopped when it had not become ready by then, RayDied when a Ray that was started here ends by itself."""
    check_files(settings)
    import ray

    from services.cluster import check_alive, own_daemons, start_ray

    stop = StopRequest()
    on_stop_signals(stop)
    serves = drained = cuts = False
    joined = bool(os.environ.get("RAY_ADDRESS"))
    try:
        if not joined:
            say("starting Ray")
        _until_done(lambda: start_ray(settings), stop)
        on_stop_signals(stop)  # Ray has put a handler before ours that prints its own stack
        if not joined:
            say(described())
        say(f"starting {settings.model_name}")
        daemons = own_daemons()
        _deploy_until_ready(settings, stop, lambda: check_alive(daemons))
        serves = True
        say(ready_line(settings))
        while not stop.wait(_LOOK_S):
            check_alive(daemons)
        say(DRAINING)
        _drain(settings.gateway.drain_s)
        drained = True
    except Stopped:
        cuts = serves and not drained
        raise
    finally:
        # A Ray of our own with nothing to drain is killed with this session: stopped in the middle of a deployment, Serve
        # would start another.
        if cuts:
            _cut_streams(local_url(settings))
        elif joined and not drained and ray.is_initialized():
            _drain(0.0)
            _within(_SHUTDOWN_S, ray.shutdown)
    _within(_SHUTDOWN_S, ray.shutdown)
    say(STOPPED)


class StopRequest:
    """Handler of stop signals: the first is remembered, the second raises Stopped wherever the program is."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise Stopped(number)
        self._number = number
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether there was one by then."""
        return self._event.wait(timeout_s)

    def raise_if_set(self) -> None:
        if self._event.is_set():
            raise Stopped(self._number)


def _until_done(work: Callable[[], None], stop: StopRequest, watch: Callable[[], None] = lambda: None) -> None:
    """Runs `work` in a thread, so that a stop signal is heard meanwhile, and by nobody else: Ray's own handlers, which it sets
    where it starts in the main thread, raise in the middle of anything and have left the lock of `logging` taken. The thread
    does not end, for with it the kernel would end the processes that it started (PR_SET_PDEATHSIG). Raises Stopped and what
    `work` or `watch` raise."""
    done = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    while not done.wait(_WATCH_S):
        stop.raise_if_set()
        watch()
    if errors:
        raise errors[0]


def _deploy_until_ready(settings: Settings, stop: StopRequest, check_alive: Callable[[], None]) -> None:
    """Tells what is under way. Raises Failed, Stopped, or what `check_alive` raises."""
    from services.app import SCHEDULER
    from services.phase import told

    shown = ""

    def watch() -> None:
        nonlocal shown
        check_alive()
        if (phase := told(APPLICATION, SCHEDULER)) != shown:
            shown = phase
            say(phase) if phase else None

    _until_done(lambda: _deploy(settings), stop, watch)


def _deploy(settings: Settings) -> None:
    """Returns when every replica is ready; raises Failed."""
    from ray import serve

    from services.app import build
    from services.cluster import controller_options

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        where = {"host": settings.gateway.host, "port": settings.gateway.port}
        serve.start(http_options=where, controller_options=controller_options())
        serve.run(build(settings), name=APPLICATION, route_prefix="/")
        _await_ready(settings)
    except Exception as error:
        raise Failed(_reason(_replica_messages() or str(error))) from None


def _await_ready(settings: Settings) -> None:
    with httpx.Client(base_url=local_url(settings), timeout=10, trust_env=False) as client:
        for _ in range(600):
            response = client.get("/ready")
            if response.status_code == 200:
                return
            if response.json().get("final"):
                break
            threading.Event().wait(0.1)
    raise Failed(f"not ready: {response.json().get('reason', response.status_code)}")


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
    if haproxy := why_haproxy_failed(text):
        return haproxy
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Lost|Fault)\b.*: ", line)]
    return (refusals or errors or lines or ["unknown reason"])[-1]


def _drain(drain_s: float) -> None:
    """Removes the application, which drains it where there is time for that."""
    began_s = time.monotonic()

    def remove() -> None:
        # not in the main thread: a stop signal that raises inside of logging leaves its lock taken, for everyone
        logging.getLogger("ray").setLevel(logging.ERROR)
        remove_application(wait=drain_s > 0)

    _within(drain_s + _REMOVAL_S, remove)
    if drain_s and time.monotonic() - began_s >= drain_s:
        time.sleep(LAST_WORDS_S)  # the proxies are telling clients that their gateway was cut off


def remove_application(*, wait: bool) -> None:
    """wait: until it has drained and is gone."""
    from ray import serve

    while True:
        try:
            return serve.delete(APPLICATION, _blocking=wait)
        except TimeoutError:  # Serve itself waits for a minute, whatever a drain may take
            continue


def _cut_streams(url: str) -> None:
    """Kills the gateways: the proxies, which live on, then end every stream with an error event. They say that the server shuts
    down, and not that a gateway died, once the application's route is gone. Takes two times _CUT_S and LAST_WORDS_S at most."""
    _within(_CUT_S, lambda: remove_application(wait=False))
    _within(_CUT_S, lambda: _kill_gateways(url))
    time.sleep(LAST_WORDS_S)


def _kill_gateways(url: str) -> None:
    import ray

    with httpx.Client(base_url=url, timeout=_POLL_S, trust_env=False) as client:
        deadline_s = time.monotonic() + _CUT_S / 2
        while time.monotonic() < deadline_s and _has_route(client):
            time.sleep(_POLL_S / 10)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(_GATEWAYS):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def _has_route(client: httpx.Client) -> bool:
    """Asked of Serve's proxy itself; HAProxy answers otherwise, and knows no error events either."""
    try:
        return "/" in client.get("/-/routes").json()
    except (httpx.HTTPError, ValueError):
        return False


def _within(timeout_s: float, work: Callable[[], None]) -> None:
    """Runs `work` for at most so long; what it raises is of no interest any more."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)
