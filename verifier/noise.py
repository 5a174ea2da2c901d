"""Random numbers: noise keyed by (seed, output position, token id), and the generators of unseeded requests.

Keyed noise is a pure function of its key, computed with wrapping 64-bit integer arithmetic, so it is the same on every
device, batch shape and thread count. Knows no logits and no laws; sampling.py does.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

TAIL_ID = -1  # the noise of a whole tail, which competes as one pseudo-token
BLOCK_ID = -2  # block b of a tail has id BLOCK_ID - b

_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MANTISSA_BITS = 52


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _fold(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, in place; torch shifts int64 arithmetically, hence the mask."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place: with keys a Weyl step apart it passes BigCrush."""
    x = _fold(x, 30).mul_(_signed(_MIX_1))
    x = _fold(x, 27).mul_(_signed(_MIX_2))
    return _fold(x, 31)


def seed_key(seed: int) -> int:
    """Any integer seed as a well spread signed 64-bit key."""
    x = seed % _WORD
    x = (x ^ x >> 30) * _MIX_1 % _WORD
    x = (x ^ x >> 27) * _MIX_2 % _WORD
    return _signed(x ^ x >> 31)


def row_keys(seed_keys: Tensor, positions: Tensor) -> Tensor:
    """int64 [B]: one key per (seed, output position). seed_keys: int64 [B] from `seed_key`; positions: [B] >= 0."""
    return _mix((positions.to(torch.int64) + 1).mul_(_signed(_GOLDEN)).add_(seed_keys))


def keyed_uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float64 in (0, 1), open at both ends. keys (from `row_keys`) and token_ids broadcast."""
    bits = _mix(keys + (token_ids.to(torch.int64) + 1).mul_(_signed(_GOLDEN)))
    bits = (bits >> (64 - _MANTISSA_BITS)).bitwise_and_((1 << _MANTISSA_BITS) - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-_MANTISSA_BITS)


def keyed_gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64: argmax over tokens of log p + noise is a draw from p."""
    return keyed_uniform(keys, token_ids).log_().neg_().log_().neg_()


def fresh_generator(seed: int | None, stream: str, device: torch.device | str) -> torch.Generator:
    """The generator of one worker's unseeded draws.

    `stream` names the worker ("drafter", "verifier"): equal seeds on both sides must not give equal numbers, because
    acceptance noise that repeats the draft's noise biases the output. seed None takes the system's entropy.
    """
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
        return generator
    digest = hashlib.blake2b(f"{stream}:{seed}".encode(), digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(digest, "little") >> 1)
