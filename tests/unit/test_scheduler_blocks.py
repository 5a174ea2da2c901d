"""Blocks, the prefix cache and block tables: what is taken comes back, and a hit is never somebody else's text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blocks import BlockAllocator, OutOfBlocks
from scheduler.errors import InternalFault
from scheduler.live import Live, new_live
from scheduler.prefix import ROOT, PrefixCache
from scheduler.tables import BlockTables
from scheduler.wire import Request, SamplingParams

SIZE = 4


def live_of(tokens: list[int], max_tokens: int = 8, name: str = "r") -> Live:
    request = Request(name, tuple(tokens), SamplingParams(max_tokens=max_tokens))
    return new_live(request, now=0.0, deadline_s=1e9, block_size=SIZE)


def computed(tables: BlockTables, tokens: list[int]) -> Live:
    """A request whose prompt has all its rows, published."""
    live = live_of(tokens)
    tables.restore(live)
    assert tables.grow(live, live.num_known)
    live.num_computed = live.num_known - 1
    tables.publish(live)
    return live


def test_block_zero_is_never_handed_out() -> None:
    allocator = BlockAllocator(5)
    assert sorted(allocator.take(4)) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks):
        allocator.take(1)


def test_a_failed_take_takes_nothing() -> None:
    allocator = BlockAllocator(5)
    with pytest.raises(OutOfBlocks):
        allocator.take(5)
    assert allocator.num_free == 4


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.take(1)
    assert allocator.share(block) == 2
    assert allocator.give_back(block) == 1
    assert allocator.num_free == 1
    assert allocator.give_back(block) == 0
    assert allocator.num_free == 2


def test_giving_back_twice_is_a_fault_not_a_corruption() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.take(1)
    allocator.give_back(block)
    with pytest.raises(InternalFault, match="more often than it was taken"):
        allocator.give_back(block)
    with pytest.raises(InternalFault):
        allocator.give_back(0)
    with pytest.raises(InternalFault, match="nobody holds it"):
        allocator.share(block)


def test_integrity_names_a_leaked_block() -> None:
    allocator = BlockAllocator(4)
    first, second = allocator.take(2)
    allocator.check_integrity([first, second])
    with pytest.raises(InternalFault, match=f"block {second} counts 1 holders but has 0"):
        allocator.check_integrity([first])


def test_a_hit_shares_the_blocks_and_leaves_a_token_to_compute() -> None:
    tables = BlockTables(16, SIZE, cached=True)
    first = computed(tables, [*range(12), 99])
    for num_tokens, hit in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)):
        second = live_of([*range(12), 99][:num_tokens])
        tables.restore(second)
        assert second.num_computed == hit, num_tokens
        assert second.block_table[: second.num_blocks].tolist() == first.block_table[: hit // SIZE].tolist()
        tables.check_integrity([first, second])
        tables.release(second)


def test_equal_tokens_after_different_prefixes_are_different_blocks() -> None:
    tables = BlockTables(16, SIZE, cached=True)
    computed(tables, [1, 1, 1, 1, 5, 6, 7, 8, 0])
    other = live_of([2, 2, 2, 2, 5, 6, 7, 8, 0])
    tables.restore(other)
    assert other.num_computed == 0


def test_computing_cached_tokens_again_ends_in_one_copy() -> None:
    """Two requests with one prompt computed side by side: the second's blocks are given back for the first's."""
    tables = BlockTables(16, SIZE, cached=True)
    first, second = live_of([*range(9)]), live_of([*range(9)], name="s")
    for live in (first, second):
        tables.grow(live, 9)
        live.num_computed = 8
    tables.publish(first)
    tables.publish(second)
    assert first.block_table[:2].tolist() == second.block_table[:2].tolist()
    assert first.block_table[2] != second.block_table[2]
    assert tables.num_used == 4
    tables.check_integrity([first, second])


def restored(tables: BlockTables, tokens: list[int]) -> Live:
    live = live_of(tokens)
    tables.restore(live)
    return live


def test_a_hit_says_from_where_on_the_drafter_has_its_rows() -> None:
    tables = BlockTables(32, SIZE, cached=True)
    live = live_of([*range(20)])
    tables.grow(live, 20)
    for num_computed, captured in ((6, True), (11, False), (19, True)):
        live.num_computed = num_computed
        if not captured:
            tables.miss(live)
        tables.publish(live)
    assert live.context_from == 12
    for num_tokens, context_from in ((5, 0), (9, 8), (13, 12), (17, 12)):
        assert restored(tables, [*range(num_tokens)]).context_from == context_from


def test_in_a_new_epoch_of_the_drafter_cached_blocks_have_no_context() -> None:
    tables = BlockTables(32, SIZE, cached=True)
    computed(tables, [*range(9)])
    assert restored(tables, [*range(9)]).context_from == 0
    tables.cache.forget_contexts()
    hit = restored(tables, [*range(17)])
    assert (hit.num_computed, hit.context_from) == (8, 8)
    tables.grow(hit, 17)
    hit.num_computed = 16
    tables.publish(hit)
    assert restored(tables, [*range(17)]).context_from == 8, "what was computed after it has one"


def two_of_whom_the_first_is_not_seen(tables: BlockTables) -> tuple[Live, Live]:
    bare, seen = live_of([*range(13)]), live_of([*range(13)], name="s")
    for live in (bare, seen):
        tables.grow(live, 13)
        live.num_computed = 8
    tables.miss(bare)
    tables.publish(bare)
    return bare, seen


def test_what_is_computed_with_a_context_takes_the_place_of_what_is_cached_without() -> None:
    tables = BlockTables(32, SIZE, cached=True)
    bare, seen = two_of_whom_the_first_is_not_seen(tables)
    bare.num_computed = 12
    tables.miss(bare)
    tables.publish(bare)
    tables.release(bare)
    num_free = tables.allocator.num_free
    tables.publish(seen)
    tables.check_integrity([seen])
    assert tables.allocator.num_free == num_free + 2
    hit = restored(tables, [*range(13)])
    assert hit.block_table[:2].tolist() == seen.block_table[:2].tolist()
    assert (hit.num_computed, hit.context_from) == (12, 12), "the third block is still the one without"
    tables.check_integrity([seen, hit])


def test_who_computes_with_a_context_what_others_hold_without_keeps_his_own_blocks() -> None:
    tables = BlockTables(32, SIZE, cached=True)
    bare, seen = two_of_whom_the_first_is_not_seen(tables)
    tables.publish(seen)
    seen.num_computed = 12
    tables.publish(seen)
    assert seen.context_from == 0
    assert not set(seen.block_table[:3].tolist()) & set(bare.block_table[:3].tolist())
    assert tables.cache.num_cached == 2
    tables.check_integrity([bare, seen])
    tables.release(seen)
    tables.check_integrity([bare])
    assert tables.cache.num_cached == 2


def cached_without_a_context(tables: BlockTables, tokens: list[int], num_rows: int) -> Live:
    """The blocks of the first num_rows are in the cache without the drafter's context, those after them with it."""
    live = live_of(tokens)
    tables.grow(live, live.num_known)
    live.num_computed = num_rows
    tables.miss(live)
    tables.publish(live)
    live.num_computed = live.num_known - 1
    tables.publish(live)
    return live


def test_where_context_is_wanted_the_last_rows_are_computed_again_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.tables.ENOUGH_CONTEXT", 3 * SIZE - 1)
    tables = BlockTables(32, SIZE, cached=True)
    tokens = [*range(5 * SIZE + 1)]
    tables.release(cached_without_a_context(tables, tokens, 4 * SIZE))
    num_available = tables.num_available
    healer = live_of(tokens)
    tables.restore(healer, heals=True)
    assert (healer.num_computed, healer.context_from) == (2 * SIZE, 2 * SIZE), "three blocks are enough"
    tables.check_integrity([healer])
    tables.grow(healer, healer.num_known)
    healer.num_computed = healer.num_known - 1
    tables.publish(healer)
    tables.check_integrity([healer])
    follower = live_of(tokens, name="f")
    tables.restore(follower, heals=True)
    assert (follower.num_computed, follower.context_from) == (5 * SIZE, 2 * SIZE)
    assert follower.block_table[:5].tolist() == healer.block_table[:5].tolist()
    tables.release(healer)
    tables.release(follower)
    tables.check_integrity([])
    assert tables.num_available == num_available and tables.cache.num_idle == 5


def test_who_comes_while_a_prefix_is_computed_anew_goes_on_behind_what_is_done_and_keeps_nobody_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.tables.ENOUGH_CONTEXT", 3 * SIZE)
    tables = BlockTables(32, SIZE, cached=True)
    tokens = [*range(5 * SIZE + 1)]
    tables.release(cached_without_a_context(tables, tokens, 5 * SIZE))
    healer, other, follower = (live_of(tokens, name=name) for name in "hof")
    tables.restore(healer, heals=True)
    tables.grow(healer, healer.num_known)
    healer.num_computed = 3 * SIZE
    tables.publish(healer)
    tables.restore(other, heals=True)
    assert (other.num_computed, other.context_from) == (3 * SIZE, 2 * SIZE), "a block is done already"
    tables.check_integrity([healer, other])
    tables.grow(other, other.num_known)
    for live in (healer, other):
        live.num_computed = live.num_known - 1
        tables.publish(live)
    tables.restore(follower, heals=True)
    assert (follower.num_computed, follower.context_from) == (5 * SIZE, 2 * SIZE)
    assert {tuple(live.block_table[:5].tolist()) for live in (healer, other, follower)} == {
        tuple(follower.block_table[:5].tolist())
    }
    for live in (healer, other, follower):
        tables.release(live)
    tables.check_integrity([])


def test_what_somebody_holds_without_a_context_is_not_computed_again() -> None:
    tables = BlockTables(32, SIZE, cached=True)
    tokens = [*range(2 * SIZE + 1)]
    holder, hit = cached_without_a_context(tables, tokens, 2 * SIZE), live_of(tokens, name="h")
    tables.restore(hit, heals=True)
    assert (hit.num_computed, hit.context_from) == (2 * SIZE, 2 * SIZE), "its own could not take their place"
    tables.check_integrity([holder, hit])


def test_a_prefix_with_enough_context_behind_what_has_none_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.tables.ENOUGH_CONTEXT", 3 * SIZE)
    tables = BlockTables(32, SIZE, cached=True)
    tokens = [*range(5 * SIZE + 1)]
    tables.release(cached_without_a_context(tables, tokens, 2 * SIZE))
    hit = live_of(tokens)
    tables.restore(hit, heals=True)
    assert (hit.num_computed, hit.context_from) == (5 * SIZE, 2 * SIZE)
    tables.check_integrity([hit])


def test_a_cleared_cache_keeps_what_is_in_use_so_that_sharers_hold_one_chain() -> None:
    """Forgotten, the second block would be filed after another first block than the one that its second holder has."""
    tables = BlockTables(32, SIZE, cached=True)
    first, second = computed(tables, [*range(9)]), restored(tables, [*range(9)])
    other = live_of([*range(9)])
    tables.grow(other, 9)
    other.num_computed = SIZE
    tables.cache.clear()
    for live in (other, first):
        tables.publish(live)
    tables.release(first)
    tables.release(other)
    tables.cache.take(tables.num_available)
    tables.cache.check_integrity()
    assert second.block_table[:2].tolist() == list(tables.cache.held())


def test_the_least_recently_used_blocks_go_first_and_leaves_before_parents() -> None:
    tables = BlockTables(8, SIZE, cached=True)
    for tokens in ([1] * 9, [2] * 9, [3] * 9):
        tables.release(computed(tables, tokens))
    assert tables.cache.num_idle == 6
    warm = live_of([1] * 9)
    tables.restore(warm)
    assert warm.num_computed == 8
    tables.release(warm)
    tables.cache.take(2)
    for tokens, hit in (([1] * 9, 8), ([2] * 9, 4), ([3] * 9, 8)):
        live = live_of(tokens)
        tables.restore(live)
        assert live.num_computed == hit, tokens
        tables.release(live)
    tables.cache.check_integrity()


def test_blocks_in_use_are_never_evicted() -> None:
    tables = BlockTables(5, SIZE, cached=True)
    computed(tables, [1] * 9)
    with pytest.raises(OutOfBlocks):
        tables.cache.take(2)
    assert len(tables.cache.take(1)) == 1


def test_a_failed_take_evicts_nothing() -> None:
    tables = BlockTables(5, SIZE, cached=True)
    tables.release(computed(tables, [1] * 9))
    with pytest.raises(OutOfBlocks):
        tables.cache.take(5)
    assert tables.cache.num_idle == 2


def test_clearing_forgets_all_that_nobody_holds() -> None:
    tables = BlockTables(12, SIZE, cached=True)
    live = computed(tables, [1] * 9)
    tables.release(computed(tables, [2] * 9))
    tables.cache.clear()
    tables.check_integrity([live])
    for token, hit in ((1, 8), (2, 0)):
        late = restored(tables, [token] * 9)
        assert late.num_computed == hit
        tables.release(late)
    tables.release(live)
    tables.cache.clear()
    assert tables.allocator.num_free == 11


def test_a_name_is_never_used_again() -> None:
    """A stale name must not lead into a prefix that took its place."""
    cache = PrefixCache(BlockAllocator(8), SIZE)
    names = set()
    for _ in range(3):
        (block,) = cache.take(1)
        entry = cache.insert(ROOT, b"same", block)
        assert entry is not None
        names.add(entry.name)
        cache.give_back([block])
        cache.clear()
    assert len(names) == 3


def test_growing_past_the_pool_changes_nothing() -> None:
    tables = BlockTables(4, SIZE, cached=True)
    live = live_of([1] * 9, max_tokens=20)
    assert tables.grow(live, 8)
    assert not tables.grow(live, 17)
    assert live.num_blocks == 2
    assert tables.grow(live, 12)
    tables.check_integrity([live])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_hit_is_always_the_longest_published_prefix_still_there(data: st.DataObject) -> None:
    """Against a slow twin that keeps whole token lists; random use, sharing and eviction."""
    tables = BlockTables(data.draw(st.integers(6, 14)), 2, cached=True)
    running: list[Live] = []
    contents: dict[int, tuple[int, ...]] = {}
    for step in range(40):
        if running and data.draw(st.booleans()):
            tables.release(running.pop(data.draw(st.integers(0, len(running) - 1))))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        request = Request(str(step), tuple(tokens), SamplingParams(max_tokens=1))
        live = new_live(request, now=0.0, deadline_s=1e9, block_size=2)
        tables.restore(live)
        for index, block in enumerate(live.block_table[: live.num_blocks].tolist()):
            assert contents[block] == tuple(tokens[: 2 * index + 2])
        assert live.num_computed < len(tokens)
        if not tables.grow(live, len(tokens)):
            tables.release(live)
            continue
        live.num_computed = len(tokens) - 1
        for index in range(live.num_computed // 2):
            contents[int(live.block_table[index])] = tuple(tokens[: 2 * index + 2])
        tables.publish(live)
        running.append(live)
        tables.check_integrity(running)
    for live in running:
        tables.release(live)
    assert tables.num_used == 0


def test_tokens_survive_in_the_block_table_of_numpy_integers() -> None:
    tables = BlockTables(16, SIZE, cached=True)
    live = computed(tables, [*range(9)])
    assert live.block_table.dtype == np.int32
    assert live.blocks().base is None, "a plan's table must not change when the request's does"
