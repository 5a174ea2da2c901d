"""Rejection sampling by rejection.c, where the machine can run it. Owns the call; what it decides is acceptance.py's to say.

Only for laws that nothing truncates: softmax of the logits at the request's temperature.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verifier import native

Ints = npt.NDArray[np.int64]

_SOURCE = Path(__file__).with_name("rejection.c")
_BLOCK = 512


class _Rejection(ctypes.Structure):
    """Rejection in rejection.c."""

    _fields_ = (
        [("logits", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("columns", "requests", "width", "threads")]
        + [(name, ctypes.c_void_p) for name in ("first_row", "num_draft", "first_draft", "drafts", "q_ids")]
        + [(name, ctypes.c_void_p) for name in ("temperatures", "q_probs", "q_of_drafts", "accept_noise", "draw_noise")]
        + [(name, ctypes.c_void_p) for name in ("accepted", "tokens", "tops", "sums", "left_over")]
    )


@cache
def _load() -> ctypes.CDLL | None:
    library = native.compiled(_SOURCE) if native.load() is not None else None
    if library is not None:
        library.dspark_reject.argtypes = [ctypes.c_void_p]
        library.dspark_reject.restype = None
    return library


def usable(logits: Tensor) -> bool:
    return logits.dtype is torch.bfloat16 and logits.device.type == "cpu" and _load() is not None


def reject(
    logits: Tensor,
    *,
    first_row: Ints,
    num_draft: Ints,
    first_draft: Ints,
    drafts: Ints,
    temperatures: npt.NDArray[np.float64],
    q_ids: Ints,
    q_probs: npt.NDArray[np.float32],
    q_of_drafts: npt.NDArray[np.float64],
    generator: torch.Generator | None,
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """Accepted drafts and next token of each request, both int64 [E], and the largest logit of every row that was read [S],
    NaN where it has no law (the request's answer is then 0) and 0 for the rows that were not.

    logits [S, V] bfloat16; first_row, num_draft, first_draft, temperatures [E]: a request's rows and drafts; drafts,
    q_of_drafts [D]; q_ids, q_probs [D or more, K]: the laws of the drafts, distinct ids below V, mass 0 where there is none.
    """
    library = _load()
    assert library is not None, "ask usable() first"
    logits, num_requests = logits.contiguous(), len(first_row)
    num_threads = min(torch.get_num_threads(), num_requests)
    noise = torch.rand(len(drafts) + num_requests, dtype=torch.float64, generator=generator).numpy()
    accepted, tokens = np.empty(num_requests, dtype=np.int64), np.empty(num_requests, dtype=np.int64)
    tops = np.zeros(logits.shape[0], dtype=np.float32)
    given: dict[str, npt.NDArray[Any]] = {
        "first_row": first_row,
        "num_draft": num_draft,
        "first_draft": first_draft,
        "drafts": drafts,
        "q_ids": q_ids,
        "temperatures": temperatures.astype(np.float32),
        "q_probs": q_probs,
        "q_of_drafts": q_of_drafts,
        "accept_noise": noise[: len(drafts)],
        "draw_noise": noise[len(drafts) :],
        "accepted": accepted,
        "tokens": tokens,
        "tops": tops,
        "sums": np.empty((num_threads, 2, -(-logits.shape[1] // _BLOCK))),
        "left_over": np.empty((num_threads, q_ids.shape[1])),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
    call = _Rejection(
        logits=logits.data_ptr(),
        columns=logits.shape[1],
        requests=num_requests,
        width=q_ids.shape[1],
        threads=num_threads,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    library.dspark_reject(ctypes.addressof(call))
    return accepted, tokens, tops
