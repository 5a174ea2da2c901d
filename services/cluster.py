"""What of Ray's resources each process gets: joining or starting a cluster, placement, GPU shares, thread settings."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.serve._private.logging_utils import get_serve_logs_dir

from services.gateway.proxy_answers import ENVIRONMENT as PROXY_ENVIRONMENT
from services.ingress import ingress_environment
from services.logs import LogConfig, configure
from services.settings import Settings

# Serve takes a proxy for dead, also one whose process is gone, and one that starts for failed, after three looks. By default a
# dead one is missed for half a minute, and on a machine that is busy starting models proxies are started for ever.
SERVE_ENVIRONMENT = {
    **PROXY_ENVIRONMENT,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

# What Ray's own processes are told so that they leave the processors to ours; whoever sets one of them keeps what was set. On a
# cluster that is joined it has to be in the environment of each node, as the chart puts it.
QUIET_ENVIRONMENT = {
    # Ten looks a second of Serve's controller at what runs take more of a processor than all chunks of 16 streams in HAProxy.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # Each process of Serve hands its metrics on ten times a second; nobody reads them so often.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    # Ray's own is 15: below its daemons, of which none is waited for.
    "RAY_worker_niceness": "0",
}

_OBJECT_STORE_BYTES = 256 * 1024 * 1024
_CONNECT_S = 1.0

Daemons = dict[str, tuple[str, int]]


class RayDied(ConnectionError):
    """A process of Ray itself is gone, and everything that runs on it with it."""


def start_ray(settings: Settings) -> None:
    """Joins the cluster that RAY_ADDRESS names, else starts Ray on this machine. Quiet on purpose: replicas log to files,
    and the terminal shows what a person needs."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(SERVE_ENVIRONMENT | ingress_environment())
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return
    _drop_dangling_link()
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=max(os.cpu_count() or 1, _needed_cpus(settings)),
        object_store_memory=_OBJECT_STORE_BYTES,
        **quiet,
    )


def _drop_dangling_link() -> None:
    """Ray renews session_latest only where it leads somewhere; users are told to look for logs behind it."""
    latest = Path(tempfile.gettempdir()) / "ray" / "session_latest"
    if latest.is_symlink() and not latest.exists():
        with contextlib.suppress(OSError):
            latest.unlink()


def log_here(process: str, config: LogConfig) -> None:
    """Lines of this Ray process go to a file of its own beside Serve's."""
    configure(process, config, get_serve_logs_dir())


def controller_options() -> dict[str, Any]:
    """For serve.start. The processes of a cluster that was joined do not have our environment; the proxies get theirs
    from Serve's controller."""
    return {"runtime_env": {"env_vars": SERVE_ENVIRONMENT}} if os.environ.get("RAY_ADDRESS") else {}


def own_daemons() -> Daemons:
    """The two processes that nothing restarts, and where they listen: those of a Ray that start_ray started, else none."""
    if os.environ.get("RAY_ADDRESS"):
        return {}
    gcs_host, _, gcs_port = ray.get_runtime_context().gcs_address.rpartition(":")
    (node,) = ray.nodes()
    return {
        "gcs_server": (gcs_host, int(gcs_port)),
        "raylet": (node["NodeManagerAddress"], int(node["NodeManagerPort"])),
    }


def check_alive(daemons: Daemons) -> None:
    """Raises RayDied. Without asking Ray, whose own calls wait for minutes for a process that is gone."""
    for name, address in daemons.items():
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
        except ConnectionRefusedError:
            raise RayDied(f"Ray's {name} process died, and the server with it; start it again") from None
        except OSError:
            continue


def _needed_cpus(settings: Settings) -> int:
    resources = settings.resources
    gateways = resources.gateway_cpus * settings.gateway.replicas
    group = resources.scheduler_cpus + resources.verifier_cpus + resources.drafter_cpus
    return int(gateways + settings.groups * group) + 1


def visible_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def resolve_placement(placement: str, num_gpus: float) -> str:
    """`auto`: a device each where there are two, else one process for both."""
    if placement != "auto":
        return placement
    return "split" if num_gpus >= 2 else "colocated"


def gpu_shares(settings: Settings, placement: str) -> dict[str, float]:
    """GPUs of each process that computes; two workers of an engine group that has one GPU share it."""
    available = visible_gpus() / settings.groups
    fair = min(1.0, available / 2) if placement == "split" else min(1.0, available)
    wanted = settings.resources
    shares = {"verifier": fair if wanted.verifier_gpus is None else wanted.verifier_gpus}
    if placement == "split":
        shares["drafter"] = fair if wanted.drafter_gpus is None else wanted.drafter_gpus
    return shares
