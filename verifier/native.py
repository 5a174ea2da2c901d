"""Builds and calls native.c: the work between the matrix products of a bfloat16 step on a CPU with AVX512-BF16.

Why: with torch operators a step of the demo target spends 7 ms beside 13 ms of matrix products at one request, and its
attention alone takes 37 ms at 16 requests of 8 rows. The library is compiled once per machine with the C compiler found on it
(about two seconds) and kept in the cache folder; without a compiler, or on another CPU, torch operators do the same.

It is linked to the OpenMP runtime that torch has loaded: a second one would fight it for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from verifier.weights import default_cache_dir

logger = logging.getLogger(__name__)

HEAD_DIMS = (32, 64, 128)
MAX_QUERIES = 32  # of native.c: query rows x heads per key head in one item
# No -ffast-math: a library linked with it makes the whole process flush subnormal numbers to zero.
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp"]
_SOURCE = Path(__file__).with_name("native.c")
_HEADER = Path(__file__).with_name("bfloat16.h")


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size")]
        + [(name, ctypes.c_int64) for name in ("table_stride", "num_items", "extra")]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("cos", "sin", "positions", "slots", "limits", "extra_first")]
        + [(name, ctypes.c_void_p) for name in ("row_tables", "tables", "items")]
    )


def applies() -> bool:
    """Whether this machine's processor has the instructions that the kernels are written in."""
    return platform.machine() == "x86_64" and torch.cpu._is_avx512_bf16_supported()


def find_compiler() -> str | None:
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


def build_kernels(compiler: str) -> Path:
    """The library file of the target's step, built where it is not there; raises OSError or SubprocessError."""
    return _built(_SOURCE, compiler)


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library built from a C source of ours, or None where this machine cannot build or run it."""
    if not applies():
        return None
    compiler = find_compiler()
    if compiler is None:
        logger.warning("no C compiler found: torch operators are used, which take longer (install gcc)")
        return None
    try:
        return ctypes.CDLL(str(_built(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be built or loaded, torch operators are used instead: %s", source.name, error)
        return None


@cache
def load() -> ctypes.CDLL | None:
    """The kernels of the target's step, or None."""
    library = compiled(_SOURCE)
    if library is None:
        return None
    void, integer = ctypes.c_void_p, ctypes.c_int64
    library.dspark_rms_norm.argtypes = [void, void, void, integer, integer, ctypes.c_float]
    library.dspark_swiglu.argtypes = [void, void, integer, integer]
    library.dspark_attend.argtypes = [void, void, void, void]
    for function in (library.dspark_rms_norm, library.dspark_swiglu, library.dspark_attend):
        function.restype = None
    return library


def _built(source: Path, compiler: str) -> Path:
    """Path of the shared library for a source, compiler and CPU; built into a temporary file, then renamed."""
    cpu = "".join(line for line in _cpu_lines() if line.startswith(("model name", "flags")))
    parts = [source.read_text(), _HEADER.read_text(), compiler, " ".join(_FLAGS), cpu]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = default_cache_dir() / "native"
    target = folder / f"native-{key}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "native.so"
        gomp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        link = [f"-L{gomp[0].parent}", f"-l:{gomp[0].name}"] if gomp else []
        command = [compiler, *_FLAGS, f"-I{_HEADER.parent}", "-shared", str(source), *link, "-lm", "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode:
            raise OSError(f"{compiler}: {(result.stderr.strip().splitlines() or ['failed'])[0]}")
        os.replace(built, target)
    return target


def _cpu_lines() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return lines[: lines.index("\n")] if "\n" in lines else lines


def usable(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> bool:
    """Whether the native kernels can compute attention of this shape. group: query heads per key head."""
    return (
        dtype is torch.bfloat16
        and device.type == "cpu"
        and head_dim in HEAD_DIMS
        and group <= MAX_QUERIES
        and load() is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x [N, d] contiguous bfloat16; None when the native kernel does not apply."""
    library = load()
    if library is None or x.dtype is not torch.bfloat16 or x.device.type != "cpu" or x.shape[-1] % 16:
        return None
    out = torch.empty_like(x)
    library.dspark_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
    return out


def swiglu(gate_up: Tensor) -> Tensor | None:
    """gate_up [N, 2 f] contiguous bfloat16; None when the native kernel does not apply."""
    library = load()
    width = gate_up.shape[-1] // 2
    if library is None or gate_up.dtype is not torch.bfloat16 or gate_up.device.type != "cpu" or width % 16:
        return None
    out = gate_up.new_empty(gate_up.shape[0], width)
    library.dspark_swiglu(gate_up.data_ptr(), out.data_ptr(), gate_up.shape[0], width)
    return out


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive flat rows of one request. limits: cached positions that each row sees; extra_first: see native.c."""

    first_row: int
    num_rows: int
    table: int


class AttentionStep:
    """One step's arguments of dspark_attend, kept alive while its layers run."""

    def __init__(
        self,
        *,
        rows: Sequence[Rows],
        tables: np.ndarray,
        limits: np.ndarray,
        positions: Tensor,
        slots: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        extra: int = 0,
        extra_first: np.ndarray | None = None,
    ) -> None:
        """tables [R, n] block ids; limits [N]; positions, slots [N] int64; cos_sin [max_len, hd / 2] float32 each.

        extra, extra_first: each row also sees that many rows of the batch itself from its extra_first on (drafts).
        """
        library = load()
        assert library is not None, "ask usable() first"
        self._library = library
        group = num_heads // num_kv_heads
        per_item = max(1, min(8, MAX_QUERIES // group))
        items = [
            (first, min(per_item, r.first_row + r.num_rows - first))
            for r in rows
            for first in range(r.first_row, r.first_row + r.num_rows, per_item)
        ]
        row_tables = np.repeat([r.table for r in rows], [r.num_rows for r in rows]).astype(np.int32)
        self._alive = (
            np.array(items, dtype=np.int32),
            row_tables,
            np.ascontiguousarray(tables, dtype=np.int32),
            limits.astype(np.int32),
            None if extra_first is None else extra_first.astype(np.int32),
            positions,
            slots,
            cos_sin,
        )
        item_array, _, table_array, limit_array, extra_array = self._alive[:5]
        self._step = _Step(
            num_rows=len(positions),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_stride=table_array.shape[1],
            num_items=len(items),
            extra=extra,
            scale=head_dim**-0.5,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            positions=positions.data_ptr(),
            slots=None if slots is None else slots.data_ptr(),
            limits=limit_array.ctypes.data,
            extra_first=None if extra_array is None else extra_array.ctypes.data,
            row_tables=row_tables.ctypes.data,
            tables=table_array.ctypes.data,
            items=item_array.ctypes.data,
        )
        self._address = ctypes.addressof(self._step)

    def attend(self, qkv: Tensor, pool: Tensor, out: Tensor) -> None:
        """qkv [N, H + 2 KV, hd] contiguous, rotated in place; pool: one layer's cache; out [N, H * hd]."""
        self._library.dspark_attend(self._address, qkv.data_ptr(), pool.data_ptr(), out.data_ptr())
