"""Memory in pages of 2 MB, where Linux gives them to who asks (transparent huge pages).

Why: a step of the demo target reads 270 MB of weights, and cached rows from all over the pool: 66,000 addresses in pages of
4 KB. Products take 4 to 8 % less this way (two cores, 1 to 48 rows, pairs of runs in one process). It is a wish: where it is
not granted everything else is the same.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNED = 64
_MADV_HUGEPAGE = 14


def ask_for(tensor: Tensor) -> Tensor:
    """The same tensor of the CPU, whose memory nobody has touched yet: what is touched is in small pages already."""
    if sys.platform == "linux" and tensor.device.type == "cpu" and tensor.nbytes >= _PAGE:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        length = tensor.data_ptr() + tensor.nbytes - first
        if length >= _PAGE:
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE))
    return tensor


class Packer:
    """Copies of tensors, one behind the other in memory of its own: most are smaller than a page."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def copy(self, tensor: Tensor) -> Tensor:
        """Contiguous; it lives as long as anything copied beside it."""
        taken = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return taken.copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                # a page more than is needed, for the chunk begins anywhere in one
                self._chunk = ask_for(torch.empty(max(_CHUNK, num_bytes) + _PAGE, dtype=torch.uint8))
                self._used = -self._chunk.data_ptr() % _PAGE
            first, self._used = self._used, self._used + -(-num_bytes // _ALIGNED) * _ALIGNED
            return self._chunk[first : first + num_bytes]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
