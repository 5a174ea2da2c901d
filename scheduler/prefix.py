"""Owns which full blocks hold which tokens, so that a later request can start where an earlier one has been.

Must not know requests. One block table serves both caches of the workers, so a hit restores the target's KV and, where the block
was computed for it, the drafter's context. The drafter may not have written a block's rows yet when the block is matched, or
taken by another: it writes in the order of the steps, and before it drafts for anyone.

Contexts: what a drafter has seen is gone with it, and may not be wanted at all for a while. So a block says in which of the
drafter's epochs its rows were captured, and counts as without context in all others.

A cached block is held by the cache (one reference) and by the live requests whose tables contain it:

    in use    cached, held by some request      not evictable
    idle      cached, held by the cache alone   evictable, least recently used first

A request's leading cached blocks are always the cache's own, so whoever holds a block holds its ancestors, and a parent never
becomes idle before its children: the oldest idle block is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scheduler.blocks import BlockAllocator, OutOfBlocks
from scheduler.errors import InternalFault
from scheduler.wire import IntArray

ROOT = 0
"""Name of the empty prefix. Names count up and are never used again, so a stale one matches nothing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """tokens of the block, exactly, after the prefix called `parent`; `name` is the prefix with them. epoch: the drafter's, in
    which all its rows were captured; -1 where they were not."""

    name: int
    parent: int
    tokens: bytes
    block: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its blocks, each with one more reference, and the names of the prefixes that end with each.
    num_bare: leading blocks up to the last one without the drafter's context."""

    blocks: tuple[int, ...]
    names: tuple[int, ...]
    num_bare: int

    @property
    def name(self) -> int:
        return self.names[-1] if self.names else ROOT


class PrefixCache:
    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._entries: dict[tuple[int, bytes], Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._idle: OrderedDict[int, Entry] = OrderedDict()
        self._last_name = ROOT
        self.epoch = 0

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return self._allocator.num_free + len(self._idle)

    def match(self, token_ids: IntArray) -> Match:
        """Full blocks that hold the beginning of `token_ids`, leaving at least one token to compute."""
        size = self._block_size
        blocks: list[int] = []
        names: list[int] = []
        name = ROOT
        num_bare = 0
        for first in range(0, (len(token_ids) - 1) // size * size, size):
            # The tokens are the dictionary's key: a hit has compared them, a colliding hash cannot pass for one.
            entry = self._entries.get((name, token_ids[first : first + size].tobytes()))
            if entry is None:
                break
            blocks.append(entry.block)
            name = entry.name
            names.append(name)
            if entry.epoch != self.epoch:
                num_bare = len(blocks)
            self._hold(entry)
        return Match(tuple(blocks), tuple(names), num_bare)

    def healable(self, match: Match, keep: int) -> Match:
        """The blocks of it before the first bare one from `keep` on, the others given back, if what is computed anew can take the
        place of those that are bare: nobody else holds them. Otherwise the match as it is. What somebody is just computing anew
        is not computed twice, and nobody who comes meanwhile holds the rest in its old state."""
        blocks = match.blocks
        bare = [k for k in range(keep, match.num_bare) if self._by_block[blocks[k]].epoch != self.epoch]
        if not bare or any(self._allocator.num_holders(blocks[k]) > 2 for k in bare):
            return match
        first = bare[0]
        self.give_back(blocks[first:])
        return Match(blocks[:first], match.names[:first], min(match.num_bare, keep))

    def insert(self, parent: int, tokens: bytes, block: int, *, has_context: bool = True) -> Entry | None:
        """Makes `block`, held by the caller, the cached block of `tokens` after `parent`; returns the entry.

        Where the tokens are cached already the caller's block is given back and the cached one held for him instead. Not so if
        only his has a context: it takes the place of the other, or is left to him (None) while someone holds that.
        """
        entry = self._entries.get((parent, tokens))
        if entry is None:
            self._last_name += 1
            entry = Entry(self._last_name, parent, tokens, block, self.epoch if has_context else -1)
            self._entries[(parent, tokens)] = entry
            self._by_block[block] = entry
            self._allocator.share(block)
        elif entry.block != block and has_context and entry.epoch != self.epoch:
            if entry.block not in self._idle:
                return None
            return self._replace(entry, block)
        elif entry.block != block:
            self._hold(entry)
            self._allocator.give_back(block)
        return entry

    def forget_contexts(self) -> None:
        """A new epoch of the drafter: what it had seen is gone."""
        self.epoch += 1

    def take(self, count: int) -> list[int]:
        """Fresh blocks, evicting idle ones where none is free; raises OutOfBlocks, having evicted nothing."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks are wanted and {self.num_available} are available")
        while self._allocator.num_free < count:
            self._evict_oldest()
        return self._allocator.take(count)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Ends one holder's use of `blocks`, a prefix of a request's table in order."""
        for block in reversed(list(blocks)):
            left = self._allocator.give_back(block)
            if left == 1 and block in self._by_block:
                self._idle[block] = self._by_block[block]

    def clear(self) -> None:
        """Forgets all that nobody holds. What is in use stays cached: two requests may share a block, and were it forgotten, one
        of them could make it the child of another block than the one the other holds before it."""
        while self._idle:
            self._evict_oldest()

    def held(self) -> Iterator[int]:
        """The cache's own references, for the allocator's integrity check."""
        return iter(self._by_block)

    def check_integrity(self) -> None:
        names = {entry.name for entry in self._entries.values()} | {ROOT}
        for key, entry in self._entries.items():
            if key != (entry.parent, entry.tokens) or self._by_block.get(entry.block) is not entry:
                raise InternalFault(f"cached block {entry.block} is filed under the wrong tokens")
            if entry.parent not in names:
                raise InternalFault(f"cached block {entry.block} outlived its parent")
            if (self._allocator.num_holders(entry.block) == 1) != (entry.block in self._idle):
                raise InternalFault(f"cached block {entry.block} is idle and in use at once")
        if len(self._by_block) != len(self._entries):
            raise InternalFault("a cached block has no entry")

    def _hold(self, entry: Entry) -> None:
        self._allocator.share(entry.block)
        self._idle.pop(entry.block, None)

    def _replace(self, entry: Entry, block: int) -> Entry:
        """An idle entry gets `block`, whose rows the drafter has."""
        better = replace(entry, block=block, epoch=self.epoch)
        del self._idle[entry.block], self._by_block[entry.block]
        self._allocator.give_back(entry.block)
        self._entries[(entry.parent, entry.tokens)] = self._by_block[block] = better
        self._allocator.share(block)
        return better

    def _evict_oldest(self) -> None:
        block, entry = self._idle.popitem(last=False)
        del self._by_block[block]
        del self._entries[(entry.parent, entry.tokens)]
        self._allocator.give_back(block)
