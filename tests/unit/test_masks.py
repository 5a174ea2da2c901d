"""Packed token sets: bits, words and what they do to logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verifier.masks import TokenMasks, _shifted_out, _unpacked, has, num_words, put


def test_bits_are_put_and_found_one_by_one_in_any_vocabulary() -> None:
    for vocab in (1, 31, 32, 33, 100):
        words = np.zeros(num_words(vocab), dtype=np.int32)
        wanted = set(np.random.default_rng(vocab).integers(0, vocab, 20).tolist())
        for token in wanted:
            put(words, token, True)
        assert {t for t in range(vocab) if has(words, t)} == wanted
        for token in list(wanted):
            put(words, token, False)
        assert not words.any()


def test_both_ways_of_unpacking_agree() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 7)).astype(np.int32)
    shifted = _shifted_out(torch.from_numpy(words))
    assert torch.equal(shifted, _unpacked(words, torch.device("cpu")))
    assert [has(words[2], t) for t in range(7 * 32)] == shifted[2].tolist()


@pytest.mark.parametrize("vocab", [20, 64, 70])
def test_what_is_not_allowed_becomes_minus_infinity_in_the_masked_rows_only(vocab: int) -> None:
    logits = torch.randn(4, vocab)
    before = logits.clone()
    words = np.zeros((2, num_words(vocab)), dtype=np.int32)
    put(words[0], 3, True)
    put(words[1], vocab - 1, True)
    TokenMasks(np.array([2, 0]), words).apply(logits)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])
    for row, token in ((2, 3), (0, vocab - 1)):
        assert logits[row, token] == before[row, token]
        assert (logits[row] > -torch.inf).sum() == 1
