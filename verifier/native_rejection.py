"""Sampled drafts judged by rejection.c, where the machine can run it. Owns the call; what it decides is acceptance.py's to say.

Fresh noise decides by rejection, keyed noise by a race, both under laws cut as the requests ask. Against torch's operators
only rounding may differ: weights are float32 within some 4e-7 of torch's, their sums float64. So top-p may keep or cut other
tokens than torch only where the share before them is within 1e-6 of top_p, min-p where they are so close to the bound; tokens
that float32 cannot tell apart tie or not (of equal ones the lower columns come first), and what is e^-87 of the largest or less
has no weight. A race may end otherwise where its first two are so close, or a token is so close to the floor of the head. So that
a seed's text depends on no neighbour, bfloat16 logits and the same ones widened give the same: acceptance.py widens all where
somebody asks for changes.
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
from verifier.noise import row_keys
from verifier.sampling_table import SamplingTable
from verifier.wide_rows import as_blocks

Ints = npt.NDArray[np.int64]

_SOURCE = Path(__file__).with_name("rejection.c")
_BLOCK = 512  # of law.h
_LANES = 16  # weights are padded to whole registers


class _Rejection(ctypes.Structure):
    """Rejection in rejection.c."""

    _fields_ = (
        [("logits", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("single", "columns", "requests", "width", "threads", "tail_block")]
        + [(name, ctypes.c_void_p) for name in ("first_row", "num_draft", "first_draft", "drafts", "q_ids")]
        + [(name, ctypes.c_void_p) for name in ("top_k", "seeded", "keys", "temperatures", "q_probs", "top_p", "min_p")]
        + [(name, ctypes.c_void_p) for name in ("q_of_drafts", "accept_noise", "draw_noise", "accepted", "tokens")]
        + [(name, ctypes.c_void_p) for name in ("tops", "weights", "list", "sums", "left_over")]
    )


@cache
def _load() -> ctypes.CDLL | None:
    return native.compiled(_SOURCE, {"reject": "p"}) if native.load() is not None else None


def usable(logits: Tensor) -> bool:
    return logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu" and _load() is not None


def reject(
    logits: Tensor,
    *,
    first_row: Ints,
    num_draft: Ints,
    first_draft: Ints,
    drafts: Ints,
    table: SamplingTable,
    output_index: Ints,
    q_ids: Ints,
    q_probs: npt.NDArray[np.float32],
    q_of_drafts: npt.NDArray[np.float64],
    generator: torch.Generator | None,
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """Accepted drafts and next token of each request, both int64 [E], and the largest logit of every row that was read [S],
    NaN where it has no law (the request's answer is then 0) and 0 for the rows that were not.

    logits [S, V] bfloat16 or float32; first_row, num_draft, first_draft, table, output_index [E]: a request's rows, its drafts,
    its parameters (nobody is greedy), the position of its first row; drafts, q_of_drafts [D]; q_ids, q_probs [D or more, K]: the
    laws of the drafts, ids below V, mass 0 where there is none; not looked at of seeded requests.
    """
    library = _load()
    assert library is not None, "ask usable() first"
    logits, num_requests = logits.contiguous(), len(first_row)
    num_rows, num_columns = logits.shape
    num_threads = min(torch.get_num_threads(), num_requests)
    noise = torch.rand(len(drafts) + num_requests, dtype=torch.float64, generator=generator).numpy()
    accepted, tokens = np.empty(num_requests, dtype=np.int64), np.empty(num_requests, dtype=np.int64)
    tops = np.zeros(num_rows, dtype=np.float32)
    working = np.empty((2, num_threads, -(-num_columns // _LANES) * _LANES), dtype=np.float32)
    given: dict[str, npt.NDArray[Any]] = {
        "first_row": first_row,
        "num_draft": num_draft,
        "first_draft": first_draft,
        "drafts": drafts,
        "q_ids": q_ids,
        "top_k": table.top_k,
        "seeded": table.seeded.astype(np.int64),
        "keys": _keys(table, num_rows, first_row, num_draft, output_index),
        "temperatures": table.temperature.astype(np.float32),
        "q_probs": q_probs,
        "top_p": table.top_p,
        "min_p": table.min_p,
        "q_of_drafts": q_of_drafts,
        "accept_noise": noise[: len(drafts)],
        "draw_noise": noise[len(drafts) :],
        "accepted": accepted,
        "tokens": tokens,
        "tops": tops,
        "weights": working[0],
        "list": working[1],
        "sums": np.empty((num_threads, 2, -(-num_columns // _BLOCK))),
        "left_over": np.empty((num_threads, q_ids.shape[1])),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
    call = _Rejection(
        logits=logits.data_ptr(),
        single=int(logits.dtype is torch.float32),
        columns=num_columns,
        requests=num_requests,
        width=q_ids.shape[1],
        threads=num_threads,
        tail_block=as_blocks(logits).shape[-1] if table.any_seeded else num_columns,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    library.dspark_reject(ctypes.addressof(call))
    return accepted, tokens, tops


def _keys(table: SamplingTable, num_rows: int, first_row: Ints, num_draft: Ints, output_index: Ints) -> Ints:
    """int64 [S]: the key of each row of a seeded request, else 0."""
    keys = np.zeros(num_rows, dtype=np.int64)
    seeded = np.flatnonzero(table.seeded)
    if len(seeded):
        owner = np.repeat(seeded, num_draft[seeded] + 1)
        depth = np.concatenate([np.arange(num_draft[i] + 1) for i in seeded])
        positions = torch.from_numpy(output_index[owner] + depth)
        keys[first_row[owner] + depth] = row_keys(torch.from_numpy(table.seed_keys[owner]), positions).numpy()
    return keys
