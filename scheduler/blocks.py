"""Owns the KV blocks as plain integers: who may take one, how many hold it, when it is free again.

Must not know requests, tokens or tensors. The rows behind a block number live in the workers.

    block 0        never handed out: padding and measuring write there
    free           no references, on the stack
    taken          one reference per holder (a request's table, the prefix cache)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler.errors import InternalFault


class OutOfBlocks(Exception):
    """Not enough free blocks; nothing was taken."""


class BlockAllocator:
    """take / share / give back, by reference count. The count of every block must equal the number of its holders."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks are wanted and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, block: int) -> int:
        """One more holder of a taken block; returns how many there are now."""
        if self._refs[block] == 0:
            raise InternalFault(f"block {block} is shared but nobody holds it")
        self._refs[block] += 1
        return self._refs[block]

    def give_back(self, block: int) -> int:
        """One holder less; returns how many are left. The last one frees the block."""
        left = self._refs[block] - 1
        if left < 0 or block == 0:
            raise InternalFault(f"block {block} is given back more often than it was taken")
        self._refs[block] = left
        if left == 0:
            self._free.append(block)
        return left

    def num_holders(self, block: int) -> int:
        return self._refs[block]

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held`: every block once per holder. Raises InternalFault where the sums do not add up."""
        refs = np.asarray(self._refs)
        expected = np.bincount(np.fromiter(held, dtype=np.int64), minlength=self.num_blocks)
        wrong = np.flatnonzero(refs != expected)
        if len(wrong):
            block = int(wrong[0])
            raise InternalFault(f"block {block} counts {refs[block]} holders but has {expected[block]}")
        free = np.asarray(self._free, dtype=np.int64)
        if len(free) != len(np.unique(free)) or refs[free].any() or 0 in free:
            raise InternalFault("the free list holds a block twice, a taken one, or block 0")
        if len(free) + int(np.count_nonzero(refs)) != self.num_blocks - 1:
            raise InternalFault(f"{self.num_blocks - 1 - len(free) - int(np.count_nonzero(refs))} blocks leaked")
