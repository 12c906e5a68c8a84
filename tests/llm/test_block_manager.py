"""One pool: growing, sharing, copying on write, sliding, finding, evicting, clearing."""

from __future__ import annotations

import pytest

from services.llm.block_manager import NO_BLOCK, BlockManager, BlockTable, OutOfBlocks


def grown(pool: BlockManager, rows: int) -> BlockTable:
    table = BlockTable()
    pool.grow(table, rows)
    return table


def test_growing_beyond_the_pool_changes_nothing() -> None:
    pool = BlockManager(3, 4)
    table = grown(pool, 5)
    with pytest.raises(OutOfBlocks):
        pool.grow(table, 17)
    assert len(table.blocks) == 2 and pool.free == 1
    pool.check_integrity([table])


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockManager(3, 4)
    table = grown(pool, 5)
    with pytest.raises(AssertionError):
        pool.check_integrity([BlockTable(table.blocks[:1])])


def test_a_published_block_is_cached_when_released_and_found_again() -> None:
    pool = BlockManager(3, 4)
    table = grown(pool, 8)
    kept, lost = table.blocks
    pool.publish(kept, b"k")
    pool.release(table)
    assert (pool.free, pool.cached, pool.available) == (2, 1, 3)
    assert pool.find(b"k") == kept and table.blocks == []
    other = BlockTable()
    pool.adopt(other, 1, [kept])
    assert other.blocks == [NO_BLOCK, kept] and pool.cached == 0 and pool.references(kept) == 1
    pool.check_integrity([other])
    assert lost != kept


def test_a_key_that_is_taken_stays_with_the_older_block() -> None:
    pool = BlockManager(3, 4)
    old, new = grown(pool, 4), grown(pool, 4)
    pool.publish(old.blocks[0], b"k")
    pool.publish(new.blocks[0], b"k")
    assert pool.find(b"k") == old.blocks[0]
    pool.release(new)
    assert (pool.free, pool.cached) == (2, 0)
    pool.check_integrity([old])


def test_free_blocks_go_first_then_the_least_recently_released_the_tail_before_the_head() -> None:
    pool = BlockManager(4, 1)
    early, late = grown(pool, 2), grown(pool, 1)
    keys = [b"early head", b"early tail", b"late"]
    for block, key in zip(early.blocks + late.blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(early)
    pool.release(late)
    gone = []
    table = BlockTable()
    for rows in range(1, 5):
        pool.grow(table, rows)
        gone.append([k for k in keys if pool.find(k) is None])
    assert gone == [[], keys[1:2], keys[:2], keys]
    pool.check_integrity([table])


def test_a_used_block_is_never_evicted() -> None:
    pool = BlockManager(2, 1)
    table = grown(pool, 1)
    pool.publish(table.blocks[0], b"k")
    grown(pool, 1)
    with pytest.raises(OutOfBlocks):
        grown(pool, 1)
    assert pool.find(b"k") == table.blocks[0]


def test_a_forgotten_block_is_found_no_more() -> None:
    pool = BlockManager(2, 1)
    table = grown(pool, 2)
    pool.publish(table.blocks[0], b"used")
    pool.publish(table.blocks[1], b"cached")
    pool.forget(table.blocks[0])
    assert pool.find(b"used") is None
    block = table.blocks[1]
    pool.release(table)
    pool.forget(block)
    assert pool.find(b"cached") is None and (pool.free, pool.cached) == (2, 0)
    pool.check_integrity([])


def test_whoever_writes_first_after_a_fork_copies_and_the_last_holder_writes_in_place() -> None:
    pool = BlockManager(4, 4)
    one = grown(pool, 6)
    two = pool.fork(one)
    assert two.blocks == one.blocks and two.blocks is not one.blocks and pool.free == 2
    one.changed = 2
    source = one.blocks[1]
    copy = pool.make_writable(one, 1)
    assert copy == (source, one.blocks[1]) and one.changed == 1 and two.blocks[1] == source
    assert pool.make_writable(two, 1) is None
    assert pool.take_copies() == [copy] and pool.take_copies() == []
    pool.check_integrity([one, two])
    pool.release(one)
    assert pool.references(two.blocks[0]) == 1
    pool.check_integrity([two])


def test_a_copy_needs_a_block() -> None:
    pool = BlockManager(1, 4)
    one = grown(pool, 2)
    two = pool.fork(one)
    with pytest.raises(OutOfBlocks):
        pool.make_writable(one, 0)
    assert pool.take_copies() == []
    pool.check_integrity([one, two])


def test_copies_in_order_are_right_when_a_source_becomes_a_destination() -> None:
    """a is copied, given back by its last holder, and taken as the destination of another copy: all before one step."""
    pool = BlockManager(5, 1)
    one, three = grown(pool, 1), grown(pool, 1)
    two, four = pool.fork(one), pool.fork(three)
    content = {b: f"old {b}" for b in range(5)}
    wanted = content[one.blocks[0]], content[three.blocks[0]]
    a = one.blocks[0]
    pool.make_writable(one, 0)
    pool.release(two)
    pool.make_writable(three, 0)
    assert three.blocks == [a]
    for source, block in pool.take_copies():
        content[block] = content[source]
    assert (content[one.blocks[0]], content[three.blocks[0]], content[four.blocks[0]]) == (wanted[0], wanted[1], wanted[1])


def test_a_destination_that_is_given_back_and_taken_again_is_copied_once() -> None:
    pool = BlockManager(3, 1)
    one = grown(pool, 1)
    two = pool.fork(one)
    _, block = pool.make_writable(one, 0) or (0, 0)
    pool.release(one)
    three, four = BlockTable(), grown(pool, 1)
    pool.release(four)
    three = pool.fork(two)
    assert pool.make_writable(three, 0) == (two.blocks[0], block)
    assert pool.take_copies() == [(two.blocks[0], block)]


def test_blocks_behind_a_window_become_no_block_and_indices_stay() -> None:
    pool = BlockManager(4, 2)
    table = grown(pool, 8)
    last, table.changed = table.blocks[3], 4
    pool.free_behind(table, 3)
    assert table.blocks == [NO_BLOCK] * 3 + [last] and (table.first, table.held, table.changed) == (3, 1, 0)
    assert pool.free == 3
    pool.free_behind(table, 2)
    pool.check_integrity([table])
    pool.release(table)
    assert pool.free == 4


def test_a_new_entry_needs_no_mark_to_be_seen_by_the_reader() -> None:
    pool = BlockManager(4, 2)
    table = grown(pool, 4)
    table.changed = len(table.blocks)
    pool.grow(table, 6)
    assert table.blocks[table.changed :] == table.blocks[2:]


def test_a_suspect_block_is_to_be_cleared_when_it_is_handed_out_again() -> None:
    pool = BlockManager(2, 4)
    suspect, clean = grown(pool, 4), grown(pool, 4)
    block = suspect.blocks[0]
    pool.publish(block, b"k")
    pool.release(suspect, suspect=True)
    pool.release(clean)
    assert pool.take_stale() == []
    table = grown(pool, 8)
    assert sorted(table.blocks) == [0, 1] and pool.take_stale() == [block] and pool.take_stale() == []


def test_a_block_that_a_sound_sequence_gives_back_is_suspect_no_more() -> None:
    pool = BlockManager(1, 4)
    table = grown(pool, 4)
    block = table.blocks[0]
    pool.publish(block, b"k")
    pool.release(table, suspect=True)
    pool.adopt(table, 0, [block])
    pool.release(table)
    grown(pool, 4)
    assert pool.take_stale() == []


def test_the_destination_of_a_copy_is_not_cleared_after_it() -> None:
    """Clearing comes after the copies: a block handed out to be cleared, given back, then copied to, keeps the copy."""
    pool = BlockManager(2, 4)
    one = grown(pool, 2)
    pool.release(grown(pool, 4), suspect=True)
    pool.release(grown(pool, 4))
    two = pool.fork(one)
    assert pool.make_writable(one, 0) is not None
    assert pool.take_stale() == []
    pool.check_integrity([one, two])
