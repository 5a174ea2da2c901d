"""The walk of a vanilla Markov head by walk.c, where the machine can run it. Owns the calls; knows no requests.

It draws what drafter/propose.py draws: greedy tokens bit for bit, and others by the same law. Tests hold the two together.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from drafter.heads import MarkovHead, VanillaCell
from drafter.propose import scores_whole
from verifier import native
from verifier.noise import row_keys
from verifier.sampling import SamplingTable

_SOURCE = Path(__file__).with_name("walk.c")
# It cuts laws by insertion sort and races all their entries: of 64 in no time, of 6,000 more slowly than torch.
_MOST_CUT = 1024


class _Walk(ctypes.Structure):
    """Walk in walk.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("scores", "embeddings", "base", "row_of", "token_of", "anchors")]
        + [(name, ctypes.c_int64) for name in ("requests", "slots", "threads")]
        + [(name, ctypes.c_void_p) for name in ("rows", "tokens", "places", "mixed", "tops")]
        + [("kept", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("temperatures", "top_k", "seeded", "keys", "top_p", "min_p", "noise")]
        + [(name, ctypes.c_void_p) for name in ("law_ids", "law", "logits", "scratch")]
    )


@cache
def _load() -> ctypes.CDLL | None:
    return native.compiled(_SOURCE, {"walk": "p"}) if native.load() is not None else None


class NativeWalk:
    """vocabulary [Vd]: target ids, ascending, of the columns; None: the target's own."""

    def __init__(self, markov: MarkovHead, vocabulary: Tensor | None) -> None:
        library, scores = _load(), markov.score_all.product
        assert library is not None and scores is not None, "ask usable() first"
        self._walk = library.dspark_walk
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

    @staticmethod
    def draws(table: SamplingTable, num_columns: int, keep: int) -> bool:
        """Whether it can draw for these requests from so many columns: from the `keep` largest logits, or all greedily."""
        if not scores_whole(num_columns, keep) or ((table.any_truncated or table.any_seeded) and keep > _MOST_CUT):
            return False
        return table.all_greedy or 0 < keep < num_columns

    def greedy(self, base_logits: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """base_logits [R, w, Vd] bfloat16, anchor_ids [R] -> tokens drawn [R, w] (target ids), and the W1 embeddings [R, w, r]
        in float32 of the token before each slot."""
        num_requests, rank, num_threads = len(base_logits), self._w1.shape[1], torch.get_num_threads()
        return self._run(
            base_logits,
            anchor_ids,
            places=anchor_ids.new_empty(num_threads, num_requests),
            mixed=base_logits.new_empty(num_requests, rank),
            tops=torch.empty(num_threads, num_requests),
        )

    def sampled(
        self,
        base_logits: Tensor,
        anchor_ids: Tensor,
        table: SamplingTable,
        keep: int,
        output_positions: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, drawn with fresh noise or with that of (seed, output position [R, w]), and the laws that the tokens were
        drawn from: target ids [R, w, keep], ascending, and probabilities [R, w, keep] float32."""
        num_requests, num_slots, num_columns = base_logits.shape
        law_ids = anchor_ids.new_empty(num_requests, num_slots, keep)
        law = torch.empty(num_requests, num_slots, keep)
        temperatures = torch.where(table.tensor(table.greedy), 0.0, table.temperature_tensor).float()
        tokens, embeddings = self._run(
            base_logits,
            anchor_ids,
            mixed=base_logits.new_empty(num_requests, self._w1.shape[1]),
            kept=keep,
            temperatures=temperatures,
            top_k=table.tensor(table.top_k),
            seeded=table.tensor(table.seeded).long(),
            keys=row_keys(table.seed_key_tensor[:, None], output_positions),
            top_p=table.tensor(table.top_p),
            min_p=table.tensor(table.min_p),
            noise=torch.rand(num_requests, num_slots, dtype=torch.float64, generator=generator),
            law_ids=law_ids,
            law=law,
            logits=torch.empty(num_requests, num_columns),
            scratch=torch.empty(torch.get_num_threads(), 5, num_columns),
        )
        return tokens, embeddings, law_ids, law

    def _run(self, base_logits: Tensor, anchor_ids: Tensor, **own: Tensor | int) -> tuple[Tensor, Tensor]:
        """own: what only one of the two walks has; without `kept` it is the greedy one."""
        num_requests, num_slots, _ = base_logits.shape
        tokens = anchor_ids.new_empty(2, num_requests, num_slots)
        given: dict[str, Tensor | int | None] = {
            "embeddings": self._w1,
            "base": base_logits.contiguous(),
            "row_of": self._row_of,
            "token_of": self._token_of,
            "anchors": anchor_ids.contiguous(),
            "requests": num_requests,
            "slots": num_slots,
            "threads": torch.get_num_threads(),
            "rows": tokens[0],
            "tokens": tokens[1],
            **own,
        }
        values = {name: each.data_ptr() if isinstance(each, Tensor) else each for name, each in given.items()}
        arguments = _Walk(scores=ctypes.addressof(self._scores.arguments), **values)
        self._walk(ctypes.addressof(arguments))
        return tokens[1], self._w1.index_select(0, tokens[0].flatten()).float().view(num_requests, num_slots, -1)
