"""Memory in huge pages: copies are copies, nothing overlaps, and what the system refuses changes nothing."""

from __future__ import annotations

import pytest
import torch

from verifier import huge_pages
from verifier.huge_pages import Packer


def test_copies_of_any_shape_and_size_stay_apart() -> None:
    packer = Packer()
    shapes = [(3,), (7, 5), (1,), (2 << 20, 9), (33, 64), (40 << 20,), (0, 4), (1000, 1000)]
    originals = [
        torch.randint(-100, 100, shape).to(torch.bfloat16 if i % 2 else torch.float32) for i, shape in enumerate(shapes)
    ]
    copies = [packer.copy(tensor) for tensor in originals]
    for original, copy in zip(originals, copies, strict=True):
        assert torch.equal(original, copy) and copy.is_contiguous() and copy.data_ptr() % 64 == 0
        copy.fill_(-1)
    assert all((copy == -1).all() for copy in copies)
    transposed = originals[1].T
    assert torch.equal(packer.copy(transposed), transposed) and packer.copy(transposed).is_contiguous()


def test_a_copy_outlives_the_packer_and_its_neighbours() -> None:
    packer = Packer()
    kept = packer.copy(torch.arange(100.0))
    for _ in range(3):
        packer.copy(torch.zeros(9 << 20))
    del packer
    assert torch.equal(kept, torch.arange(100.0))


@pytest.mark.parametrize("num_bytes", [0, 1, (2 << 20) - 1, 2 << 20, (6 << 20) + 5])
def test_asking_returns_the_same_memory(num_bytes: int) -> None:
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    assert huge_pages.ask_for(tensor) is tensor
    assert tensor.zero_().sum() == 0
