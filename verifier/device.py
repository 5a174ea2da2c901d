"""Which device and number format a process computes in, and with how many threads."""

from __future__ import annotations

import os

import torch

from scheduler.errors import SettingsError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device {name!r} was asked for but torch sees no CUDA device; use auto or cpu")
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device has bfloat16 arithmetic, else float32 (emulated bfloat16 is slower)."""
    if name == "auto":
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise SettingsError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def set_threads(num_threads: int) -> int:
    """Threads of this process's torch operations; 0 is one per core it may use. Returns what was set."""
    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen
