"""Gives live requests their blocks and takes them back: the block tables, over the allocator and the prefix cache.

Must not know who is served first; scheduler/residency.py decides that.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.blocks import BlockAllocator, OutOfBlocks
from scheduler.live import ENOUGH_CONTEXT, Live
from scheduler.prefix import PrefixCache


class BlockTables:
    def __init__(self, num_blocks: int, block_size: int, *, cached: bool) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, block_size)
        self._cached = cached

    @property
    def capacity(self) -> int:
        """Rows that one request can ever have."""
        return (self.allocator.num_blocks - 1) * self.block_size

    @property
    def num_available(self) -> int:
        return self.cache.num_available

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.allocator.num_blocks - 1 - self.cache.num_available

    def blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.block_size)

    def grow(self, live: Live, num_rows: int) -> bool:
        """Makes the table cover `num_rows` rows; False, and nothing changed, when the blocks are not there."""
        missing = self.blocks_for(num_rows) - live.num_blocks
        if missing <= 0:
            return True
        try:
            live.block_table[live.num_blocks : live.num_blocks + missing] = self.cache.take(missing)
        except OutOfBlocks:
            return False
        live.num_blocks += missing
        return True

    def restore(self, live: Live, *, heals: bool = False) -> None:
        """Starts an empty table with the longest cached prefix of the request's tokens.

        heals: where the drafter's context of its last rows is missing they are computed once more, and what comes of it takes the
        place of the cached ones for all who follow."""
        if not self._cached:
            return
        match = self.cache.match(live.token_ids[: live.num_known])
        keep = max(0, len(match.blocks) - self.blocks_for(ENOUGH_CONTEXT))
        if heals and match.num_bare > keep:
            match = self.cache.healable(match, keep)
        live.num_blocks = live.num_chained = len(match.blocks)
        live.block_table[: live.num_blocks] = match.blocks
        live.num_computed = live.num_blocks * self.block_size
        live.context_from = match.num_bare * self.block_size
        live.chain = match.name

    def publish(self, live: Live) -> None:
        """Hands the request's full, computed blocks to the cache, up to one that cannot be cached."""
        size = self.block_size
        while self._cached and live.publishes and (live.num_chained + 1) * size <= live.num_computed:
            index = live.num_chained
            tokens = live.token_ids[index * size : (index + 1) * size].tobytes()
            has_context = index * size >= live.context_from
            entry = self.cache.insert(live.chain, tokens, int(live.block_table[index]), has_context=has_context)
            if entry is None:
                live.publishes = False
                return
            live.chain, live.block_table[index] = entry.name, entry.block
            live.num_chained += 1

    def miss(self, live: Live) -> None:
        """The drafter will not get the rows computed so far; from the next block on it may have all."""
        live.context_from = self.blocks_for(live.num_computed) * self.block_size

    def release(self, live: Live) -> None:
        self.cache.give_back(live.block_table[: live.num_blocks].tolist())
        live.forget_rows()

    def check_integrity(self, holders: Sequence[Live]) -> None:
        held = list(self.cache.held())
        for live in holders:
            live.check_integrity(self.block_size)
            held += live.block_table[: live.num_blocks].tolist()
        self.allocator.check_integrity(held)
        self.cache.check_integrity()
