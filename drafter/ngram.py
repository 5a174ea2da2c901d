"""Prompt lookup: drafts what followed the last occurrence of the current suffix in the request's tokens. No weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from scheduler.wire import Draft, DraftAsk, DrafterInfo, IntArray, SamplingParams
from verifier.features import CommittedFeatures
from verifier.turns import median_table

LONGEST_MATCH = 4
DEFAULT_WIDTH = 7
_NO_LIMIT = 2**31 - 1
_MEASURED_CONTEXT = 2048


def match_end(tokens: IntArray, longest: int = LONGEST_MATCH) -> int | None:
    """Index after the most recent earlier occurrence of the longest suffix, of at most `longest` tokens, that has one.

    One pass over the tokens; each further token of the suffix is compared only where the shorter one occurs.
    """
    if len(tokens) < 2:
        return None
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return None
    for back in range(1, min(longest, len(tokens) - 1)):
        ends_longer = ends[np.searchsorted(ends, back) :]
        ends_longer = ends_longer[tokens[ends_longer - back] == tokens[-1 - back]]
        if not len(ends_longer):
            break
        ends = ends_longer
    return int(ends[-1]) + 1


def lookup(tokens: IntArray, width: int) -> IntArray:
    """[w] tokens that followed the match; at the end of `tokens` they go on as that repetition would. Empty: no match."""
    after = match_end(tokens)
    if after is None:
        return np.zeros(0, dtype=np.int32)
    return tokens[after + np.arange(width) % (len(tokens) - after)].astype(np.int32, copy=False)


class NgramRunner:
    """Drafts are certain (no q: one-hot at the drafted token), without confidence. Needs `context_ids` of every ask."""

    def __init__(self, max_width: int = 0) -> None:
        self.width = max_width or DEFAULT_WIDTH
        self.progress = 0

    def describe(self) -> DrafterInfo:
        return DrafterInfo(
            kind="ngram",
            width=self.width,
            variable_width=True,
            has_confidence=False,
            max_len=_NO_LIMIT,
            target_layer_ids=(),
            fingerprint="ngram",
            needs_tokens=True,
        )

    def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[CommittedFeatures]) -> list[Draft]:
        self.progress += 1
        return [Draft(ask.request_id, _drafted(ask, min(width, self.width)), None) for ask in asks]

    def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        tokens = (np.arange(_MEASURED_CONTEXT) % 97).astype(np.int32)
        ask = DraftAsk("", int(tokens[-1]), len(tokens) - 1, np.zeros(1, np.int32), SamplingParams(), 0, tokens)
        works = [[partial(self.propose, [ask] * n, width, ()) for width in widths] for n in num_requests]
        return median_table(works, torch.device("cpu"))


def _drafted(ask: DraftAsk, width: int) -> IntArray:
    if ask.context_ids is None:
        raise ValueError(f"request {ask.request_id}: the n-gram drafter needs context_ids")
    return lookup(ask.context_ids, width)
