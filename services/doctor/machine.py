"""Checks of a machine by itself: software, devices, compiler, threads, ports, folders, Ray."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from scheduler import kernels
from scheduler.compiled import find_compiler
from services.doctor.findings import Finding, fail, ok, warn
from services.settings import Settings

_DISTRIBUTION = "dspark-serve"
_SHOWN = ("torch", "transformers", "ray", "numpy")
_FILES = 8192
_ANSWER_S = 2.0
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
SHARED_MEMORY = Path("/dev/shm")
OBJECT_STORE_BYTES = 256 * 1024 * 1024
GIB = 1024**3


def check_versions() -> Finding:
    """Everything the distribution needs, in the versions it names."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires(_DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return warn(
            "versions",
            f"{_DISTRIBUTION} is not installed as a package",
            "run `pip install .` so that it can be checked",
        )
    missing, strange = [], []
    for each in wanted:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(each.name)
        except PackageNotFoundError:
            missing.append(f"{each.name} is missing")
            continue
        if not each.specifier.contains(have, prereleases=True):
            strange.append(f"{each.name} is {have}, outside {each.specifier}")
    if missing:
        return fail("versions", "; ".join(missing + strange), f"run `pip install --upgrade {_DISTRIBUTION}`")
    if strange:
        return warn(
            "versions",
            "; ".join(strange),
            f"run `pip install --upgrade {_DISTRIBUTION}`, or try it: it was not tested so",
        )
    shown = ", ".join(f"{name} {version(name)}" for name in _SHOWN)
    return ok("versions", f"{_DISTRIBUTION} {version(_DISTRIBUTION)}, python {platform.python_version()}, {shown}")


def check_devices(settings: Settings) -> Finding:
    """The devices that the settings name, and a GPU that torch does not see."""
    import torch

    from verifier.device import resolve_device

    devices = {str(resolve_device(name)) for name in (settings.model.device, settings.drafter.device)}
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in gpus)
        return ok(
            "devices",
            f"{', '.join(sorted(devices))}; {shown}; CUDA {torch.version.cuda}, driver {_driver() or 'unknown'}",
        )
    if driver := _driver():
        return warn(
            "devices",
            f"an NVIDIA driver ({driver}) is here but torch {torch.__version__} sees no GPU",
            "install a CUDA build of torch that this driver runs, or set CUDA_VISIBLE_DEVICES",
        )
    return ok("devices", f"{', '.join(sorted(devices))}; no GPU")


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (told.stdout.split() or [""])[0]


def check_instructions(settings: Settings, flags: frozenset[str] | None = None) -> Finding:
    """Whether this processor computes bfloat16, where it has to. flags: as in /proc/cpuinfo."""
    import torch

    from verifier.device import resolve_device

    if resolve_device(settings.model.device) != torch.device("cpu"):
        return ok("instructions", "the target runs on a GPU")
    have = cpu_flags() if flags is None else flags
    fast = sorted(have & {"avx512_bf16", "amx_bf16"})
    if fast:
        return ok("instructions", f"bfloat16 by {' and '.join(fast)}")
    if settings.model.dtype == "bfloat16":
        return warn(
            "instructions",
            "this processor has no bfloat16 arithmetic (avx512_bf16 or amx_bf16) and model.dtype is bfloat16",
            "set model.dtype=auto, which is float32 here and faster",
        )
    return ok("instructions", f"no bfloat16 arithmetic: float32 is used{', by avx2' if 'avx2' in have else ''}")


def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def check_compiler() -> Finding:
    """The native kernels of planning, and of the step where the processor has its instructions: can they be built here, or are
    they built, and do they load."""
    from verifier import native

    twins = "steps and planning use slower torch and numpy" if native.applies() else "planning uses slower numpy"
    compiler = find_compiler()
    if compiler is None:
        return warn("compiler", f"no C compiler is on PATH, so {twins}", "install gcc, or set CC")
    try:
        kernels.load_by(compiler)
        if native.applies():
            native.load_by(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return warn(
            "compiler",
            f"the native kernels could not be built or loaded, so {twins}: {' '.join(str(error).split())}",
            "repair or replace the compiler (CC), and see that the cache folder can be written and is not mounted noexec",
        )
    return ok("compiler", f"native kernels built by {compiler}")


def check_threads(settings: Settings, limit: Path = _CPU_LIMIT) -> Finding:
    """limit: the control group's file that says how much of the processors may be used."""
    cores = len(os.sched_getaffinity(0))
    wanted = settings.threads or cores
    share = _cpu_share(limit)
    if wanted > cores:
        return warn("threads", f"threads is {wanted} and {cores} cores may be used", f"set threads to {cores} or 0")
    if share is not None and share < wanted:
        return warn(
            "threads",
            f"{wanted} threads would compute and the container may use {share:g} cores",
            f"set threads={max(1, int(share))}: threads that wait for a core hold up all others",
        )
    return ok("threads", f"{wanted} threads compute, of {cores} cores")


def _cpu_share(limit: Path) -> float | None:
    try:
        quota, period = limit.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def check_port(settings: Settings) -> Finding:
    from services.address import AddressInUse, check_address

    host, port = settings.gateway.host, settings.gateway.port
    try:
        check_address(host, port)
    except AddressInUse:
        if not (serves := _what_serves(settings)):
            raise
        return ok("port", f"{host}:{port} is held by a DSpark server that runs ({serves}); a second one needs another")
    return ok("port", f"{host}:{port} is free")


def _what_serves(settings: Settings) -> str:
    """What a server of ours at that address says of itself; empty where there is none."""
    from services.launch import local_url

    try:
        told = httpx.get(f"{local_url(settings)}/ready", timeout=_ANSWER_S, trust_env=False).json()
        return {"ready": f"serves {told.get('model')}", "not ready": str(told.get("reason"))}.get(told["status"], "")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return ""


def check_access(settings: Settings) -> Finding:
    from services import launch

    launch.check_access(settings)
    return ok("access", f"{len(settings.gateway_config().auth.keys)} API keys, listening on {settings.gateway.host}")


def check_cache(settings: Settings) -> Finding:
    """cache_dir can be written, and has room for what the first start will put there."""
    folder = settings.cache_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail("cache", f"{folder} cannot be written: {error.strerror}", "set cache_dir to a folder that can")
    free, needed = shutil.disk_usage(folder).free, _conversion_bytes(settings)
    if needed > free:
        return fail(
            "cache",
            f"{folder} has {free / GIB:.1f} GiB free and the model's conversion needs about {needed / GIB:.1f}",
            "make room, or set cache_dir to a larger disk",
        )
    return ok("cache", f"{folder} can be written, {free / GIB:.0f} GiB free")


def _conversion_bytes(settings: Settings) -> int:
    """A GGUF file becomes bfloat16: up to four times its size."""
    path = Path(settings.target_path()).expanduser()
    if path.suffix.lower() != ".gguf" or not path.is_file():
        return 0
    from verifier.weights import is_converted

    return 0 if is_converted(path, settings.cache_dir) else 4 * path.stat().st_size


def check_ray() -> Finding:
    from services.launch import check_cluster

    check_cluster()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES:
        return warn(
            "ray", f"this shell may open {files} files and Ray wants more", f"run `ulimit -n 65536` ({_FILES} at least)"
        )
    where = os.environ.get("RAY_ADDRESS")
    return ok("ray", f"{version('ray')}, {f'joins {where}' if where else 'starts here'}, {files} open files")


def check_shared_memory(folder: Path = SHARED_MEMORY, needed: int = OBJECT_STORE_BYTES) -> Finding:
    """Ray's object store lives there; where it does not fit, Ray uses a disk."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return warn("shm", f"{folder}: {error.strerror}", "mount a tmpfs there (docker: --shm-size=1g)")
    if free < needed:
        return warn(
            "shm",
            f"{folder} has {free / 1024**2:.0f} MiB free and Ray's object store takes {needed / 1024**2:.0f}",
            "enlarge it (docker: --shm-size=1g; Kubernetes: emptyDir with medium Memory)",
        )
    return ok("shm", f"{folder} has {free / GIB:.1f} GiB free")


def check_tracing(settings: Settings) -> Finding:
    endpoint = settings.tracing.endpoint
    if not endpoint:
        return ok("tracing", "off")
    address = urlsplit(endpoint)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=3).close()
    except OSError as error:
        return warn(
            "tracing",
            f"nothing answers at {endpoint} ({error}), so spans are dropped",
            "start the collector, or correct tracing.endpoint (OTEL_EXPORTER_OTLP_ENDPOINT)",
        )
    return ok("tracing", f"to {endpoint}, {settings.tracing.ratio:g} of the traces that begin here")
