"""The greedy walk of a vanilla Markov head by walk.c, where the machine can run it. Owns the call; knows no requests.

It draws what drafter/propose.py draws, bit for bit: tests hold the two together.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from drafter.heads import MarkovHead, VanillaCell
from verifier import native

_SOURCE = Path(__file__).with_name("walk.c")


class _Walk(ctypes.Structure):
    """Walk in walk.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("scores", "embeddings", "base", "row_of", "token_of", "anchors")]
        + [(name, ctypes.c_int64) for name in ("requests", "slots", "threads")]
        + [(name, ctypes.c_void_p) for name in ("rows", "tokens", "places", "mixed", "tops")]
    )


@cache
def _load() -> ctypes.CDLL | None:
    library = native.compiled(_SOURCE) if native.load() is not None else None
    if library is not None:
        library.dspark_greedy_walk.argtypes = [ctypes.c_void_p]
        library.dspark_greedy_walk.restype = None
    return library


class GreedyWalk:
    """vocabulary [Vd]: target ids, ascending, of the columns; None: the target's own."""

    def __init__(self, markov: MarkovHead, vocabulary: Tensor | None) -> None:
        library, scores = _load(), markov.score_all.product
        assert library is not None and scores is not None, "ask usable() first"
        self._run = library.dspark_greedy_walk
        self._scores, self._w1 = scores, markov.w1.contiguous()
        self._row_of = None if markov.row_of is None else markov.row_of.contiguous()
        self._token_of = None if vocabulary is None else vocabulary.to(torch.int64).contiguous()

    @staticmethod
    def usable(markov: MarkovHead) -> bool:
        return (
            isinstance(markov.cell, VanillaCell)
            and native.packable(markov.w2)
            and markov.w1.dtype is torch.bfloat16
            and _load() is not None
        )

    def __call__(self, base_logits: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """base_logits [R, w, Vd] bfloat16, anchor_ids [R] -> tokens drawn [R, w] (target ids), and the W1 embeddings [R, w, r]
        in float32 of the token before each slot."""
        num_requests, num_slots, _ = base_logits.shape
        rank, num_threads = self._w1.shape[1], torch.get_num_threads()
        base, anchors = base_logits.contiguous(), anchor_ids.contiguous()
        tokens = anchors.new_empty(2, num_requests, num_slots)
        places = anchors.new_empty(num_threads, num_requests)
        mixed, tops = base.new_empty(num_requests, rank), torch.empty(num_threads, num_requests)
        walk = _Walk(
            ctypes.addressof(self._scores.arguments),
            *(None if t is None else t.data_ptr() for t in (self._w1, base, self._row_of, self._token_of, anchors)),
            num_requests,
            num_slots,
            num_threads,
            *(t.data_ptr() for t in (tokens[0], tokens[1], places, mixed, tops)),
        )
        self._run(ctypes.addressof(walk))
        return tokens[1], self._w1.index_select(0, tokens[0].flatten()).float().view(num_requests, num_slots, rank)
