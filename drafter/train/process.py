"""Settings of a training process that no tensor shows: how it rounds numbers near zero and where its memory goes.

Must not know what is trained.
"""

from __future__ import annotations

import ctypes

import torch

# mallopt's parameters, of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def prepare_process() -> None:
    """Call once before training. Has no effect on results beyond numbers below 1e-38."""
    # laws and gradients are full of numbers near zero, on which some processors take a hundred times as long
    torch.set_flush_denormal(True)
    # every step frees and asks for the same hundred megabytes: giving them back to the system in between costs 5 to 8 % of
    # the processor in page faults
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)
