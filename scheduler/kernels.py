"""planning.c, compiled where a C compiler is found; elsewhere its twins in numpy decide the same, only later.

Owns loading and the signatures. Must not know what its callers' arrays mean: they pass them by `doubles`, `floats` and
`integers`, which refuse what C would misread, or by `Held`.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import compiled

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("planning.c")
_SIGNATURES = {
    "rates": "pppiiiddppipp",
    "correct": "ppipiidp",
    "profile": "ppiiipiipipip",
    "remember": "ppiipiipi",
    "spread": "ppipppidd",
    "learn": "pppiiiddpipppp",
    "drift": "pppiipippppddd",
    "seconds": "pppiiddddpiiip",
    "algorithm1": "ppiipdp",
    "auto": "ppiipipdpiddp",
    "forecast": "piippipidipipipippp",
}
_DOUBLE, _FLOAT, _LONG = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64)
_byte: Any = ctypes.c_char.from_buffer


def load_by(compiler: str) -> ctypes.CDLL:
    """The kernels, built where they are not there; raises OSError or SubprocessError. Calls keep the interpreter's lock: they
    take microseconds, and to get it back from a thread that computes in Python takes five milliseconds, each time."""
    return compiled.load(_SOURCE, compiler, _SIGNATURES, keeps_lock=True)


@cache
def load() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be built."""
    compiler = compiled.find_compiler()
    if compiler is None:
        return None
    try:
        return load_by(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be built or loaded, numpy is used instead: %s", _SOURCE.name, error)
        return None


class Held(tuple[int, ...]):
    """Addresses of dense, writable arrays of doubles, single floats or 64-bit integers that are passed again and again.

    The arrays live as long as it does. A copy of whatever has it, pickled ones too, has the addresses of its own arrays.
    """

    arrays: tuple[npt.NDArray[Any], ...]

    def __new__(cls, *arrays: npt.NDArray[Any]) -> Held:
        held = super().__new__(cls, (_ADDRESS_OF[array.dtype](array) for array in arrays))
        held.arrays = arrays
        return held

    def __reduce__(self) -> tuple[type[Held], tuple[npt.NDArray[Any], ...]]:
        return Held, self.arrays


def doubles(array: npt.NDArray[Any]) -> int:
    """Address of a dense, writable array of doubles that is not empty, valid while the array lives. Raises TypeError."""
    if array.dtype != _DOUBLE:
        raise TypeError(f"{array.dtype} where doubles are read")
    return ctypes.addressof(_byte(array))


def floats(array: npt.NDArray[Any]) -> int:
    """The same of float32."""
    if array.dtype != _FLOAT:
        raise TypeError(f"{array.dtype} where single floats are read")
    return ctypes.addressof(_byte(array))


def integers(array: npt.NDArray[Any]) -> int:
    """The same of int64."""
    if array.dtype != _LONG:
        raise TypeError(f"{array.dtype} where 64-bit integers are read")
    return ctypes.addressof(_byte(array))


_ADDRESS_OF = {_DOUBLE: doubles, _FLOAT: floats, _LONG: integers}
