"""Sets of allowed tokens as packed bits, and what they do to logits. Does not know where they come from.

Bit t % 32 of word t // 32 stands for token t; a row of words covers a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.int32]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """words [M, W]: the tokens allowed in each of the rows [M] of some logits."""

    rows: npt.NDArray[np.int64]
    words: Words

    def apply(self, logits: Tensor) -> None:
        """-inf at what is not allowed, in logits [S, V], in place."""
        if not len(self.rows):
            return
        rows = torch.from_numpy(self.rows).to(logits.device)
        forbidden = _unpacked(self.words, logits.device)[:, : logits.shape[1]].logical_not_()
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a grammar says of one extension. words [m, W]: the tokens allowed in its first m rows; later rows are not reached.

    num_judged: drafts that need judging: the rest comes after one that is rejected for certain, or that ends the request.
    num_run: drafts whose own rows are needed, num_judged or one less.
    dead_from: accepted drafts after which no token can be allowed, so that the request cannot go on; None is nowhere.
    dead_reason: why.
    """

    words: Words
    num_judged: int
    num_run: int
    dead_from: int | None = None
    dead_reason: str = ""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // _WORD_BITS)


def tokens_of(words: Words) -> list[int]:
    """The tokens of a row of words [W], in ascending order."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def has(words: Words, token_id: int) -> bool:
    return bool(int(words[token_id // _WORD_BITS]) >> token_id % _WORD_BITS & 1)


def put(words: Words, token_id: int, allowed: bool) -> None:
    """Changes one token's bit of words [W], in place."""
    bits = words.view(np.uint32)
    bit = np.uint32(1 << token_id % _WORD_BITS)
    if allowed:
        bits[token_id // _WORD_BITS] |= bit
    else:
        bits[token_id // _WORD_BITS] &= ~bit


def _unpacked(words: Words, device: torch.device) -> Tensor:
    """bool [M, 32 W]. On a CPU numpy is several times faster; elsewhere the packed words travel."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_))
    return _shifted_out(torch.from_numpy(words).to(device))


def _shifted_out(words: Tensor) -> Tensor:
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts).bitwise_and_(1).flatten(1).to(torch.bool)
