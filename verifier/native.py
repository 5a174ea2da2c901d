"""Builds native.c and calls its single operations, for a bfloat16 step on a CPU with AVX512-BF16.

Why: with torch operators a step of the demo target spends 7 ms beside 13 ms of oneDNN's matrix products at one request; those
products take 6 ms here (products.h), and all layers are one call (verifier/native_step.py). The library is compiled once per
machine with the C compiler found on it (a few seconds) and kept in the cache folder; without a compiler, or on another CPU,
torch operators do the same. It is linked to the OpenMP runtime that torch has loaded: a second one would fight it for the cores.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from scheduler import compiled as libraries
from verifier.huge_pages import Packer

logger = logging.getLogger(__name__)

HEAD_DIMS = (32, 64, 128)
MAX_QUERIES = 32  # of native.c: query rows x heads per key head in one item
_SOURCE = Path(__file__).with_name("native.c")
_PANEL = 32  # of products.h
_weights = Packer()
_SIGNATURES = {
    "rms_norm": "pppiif",
    "swiglu": "ppii",
    "peak": "pppii",
    "multiply": "ppipp",
    "attend": "pppp",
    "run_layers": "p",
    "run_products": "p",
}


class Product(ctypes.Structure):
    """A matrix product's packed weights, as products.h has them."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "bias")] + [
        (name, ctypes.c_int64) for name in ("inputs", "outputs")
    ]


def applies() -> bool:
    """Whether this machine's processor has the instructions that the kernels are written in."""
    return platform.machine() == "x86_64" and torch.cpu._is_avx512_bf16_supported()


def load_by(compiler: str) -> ctypes.CDLL:
    """The kernels of the target's step, built where they are not there; raises OSError or SubprocessError."""
    return _linked(_SOURCE, compiler, _SIGNATURES)


def compiled(source: Path, signatures: Mapping[str, str]) -> ctypes.CDLL | None:
    """The library built from a C source of ours, or None where this machine cannot build or run it. signatures: as
    scheduler/compiled.py reads them."""
    if not applies():
        return None
    compiler = libraries.find_compiler()
    if compiler is None:
        logger.warning("no C compiler found: torch operators are used, which take longer (install gcc)")
        return None
    try:
        return _linked(source, compiler, signatures)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be built or loaded, torch operators are used instead: %s", source.name, error)
        return None


@cache
def load() -> ctypes.CDLL | None:
    """The kernels of the target's step, or None."""
    return compiled(_SOURCE, _SIGNATURES)


def _linked(source: Path, compiler: str, signatures: Mapping[str, str]) -> ctypes.CDLL:
    gomp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    link = [f"-L{gomp[0].parent}", f"-l:{gomp[0].name}"] if gomp else []
    return libraries.load(source, compiler, signatures, flags=["-fopenmp", f"-I{_SOURCE.parent}"], link=link)


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


def peak(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Largest value of each row of logits [N, V] (NaN where there is one) and its first column, float32 and int64 [N];
    None when the native kernel does not apply."""
    library = load()
    if library is None or logits.dtype is not torch.bfloat16 or logits.device.type != "cpu":
        return None
    logits = logits.contiguous()
    tops = logits.new_empty(logits.shape[0], dtype=torch.float32)
    columns = logits.new_empty(logits.shape[0], dtype=torch.int64)
    library.dspark_peak(logits.data_ptr(), tops.data_ptr(), columns.data_ptr(), *logits.shape)
    return tops, columns


class PackedProduct:
    """x W^T + b by native.c, from a bfloat16 weight [out, in] that is packed once (layout: products.h)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        library = load()
        assert library is not None, "ask packable() first"
        self._multiply = library.dspark_multiply
        self.out_features, self.in_features = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % _PANEL))
        self.weight = _weights.copy(padded.view(-1, _PANEL, self.in_features // 2, 2).transpose(1, 2))
        self.bias = None if bias is None else bias.contiguous()
        self.arguments = Product(
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.in_features,
            self.out_features,
        )
        self._address = ctypes.addressof(self.arguments)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [.., in], residual [.., out] -> [.., out]; bfloat16 on the CPU."""
        x = _rows_of(x, self.in_features)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        added = None if residual is None else _rows_of(residual, self.out_features)
        self._multiply(
            self._address, x.data_ptr(), x.numel() // self.in_features, added.data_ptr() if added is not None else None,
            out.data_ptr(),
        )  # fmt: skip
        return out


def packable(weight: Tensor) -> bool:
    """Whether native.c multiplies by this weight."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.shape[1] % 2 == 0
        and load() is not None
    )


def _rows_of(x: Tensor, width: int) -> Tensor:
    """x as the kernel reads it. Raises TypeError or ValueError for what it would misread."""
    if x.dtype is not torch.bfloat16 or x.device.type != "cpu":
        raise TypeError(f"a packed product takes bfloat16 on the CPU, not {x.dtype} on {x.device}")
    if x.shape[-1] != width:
        raise ValueError(f"{x.shape[-1]} columns where the product has {width}")
    return x.contiguous()
