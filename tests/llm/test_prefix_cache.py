"""What a key names, and the longest prefix that every group still holds."""

from __future__ import annotations

from typing import Any

import pytest

from services.llm.block_manager import NO_BLOCK
from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.sequence import RowSpan, Sequence, Status

FULL = LayerGroup(Kind.FULL, 64)
SLIDING = LayerGroup(Kind.SLIDING, 64, 6)
PRUNED = LayerGroup(Kind.PRUNED, 64)
CROSS = LayerGroup(Kind.CROSS, 64)


def cache(*groups: LayerGroup, fingerprint: bytes = b"model") -> KvCache:
    return KvCache(list(groups) or [FULL], 4, fingerprint)


def sequence(prompt: list[int], **options: Any) -> Sequence:
    return Sequence("s", prompt, 8, frozenset(), **options)


def keys(s: Sequence, count: int, fingerprint: bytes = b"model") -> list[bytes]:
    prefix = cache(fingerprint=fingerprint).prefix
    assert prefix
    prefix.extend_keys(s, count)
    return s.keys


def compute(kv: KvCache, s: Sequence, tokens: int | None = None) -> None:
    """Admit a sequence on what the cache holds and compute all of it, or its first ``tokens`` tokens."""
    kv.admit(s, kv.longest_prefix(s))
    s.status = Status.RUNNING
    assert kv.allocate(s, tokens or s.length)
    s.computed = tokens or s.length
    kv.settle(s)
    kv.check_integrity([s])


def leave(kv: KvCache, s: Sequence) -> None:
    compute(kv, s)
    kv.release(s)


def hit(kv: KvCache, s: Sequence) -> int:
    return kv.longest_prefix(s)


TEXT = list(range(100, 120))


def test_keys_are_chained_so_that_a_block_is_found_only_behind_the_same_beginning() -> None:
    one, two = keys(sequence(TEXT), 3), keys(sequence([1, *TEXT[1:]]), 3)
    assert len(set(one + two)) == 6 and all(len(k) >= 16 for k in one)


def test_keys_grow_with_the_answer_and_say_the_same_as_those_of_a_prompt() -> None:
    whole, grows = sequence(TEXT), sequence(TEXT[:9], output=TEXT[9:11])
    first = keys(grows, 2).copy()
    grows.output += TEXT[11:]
    assert keys(grows, 5)[:2] == first and grows.keys == keys(whole, 5)


def test_fingerprint_and_salt_are_in_the_root() -> None:
    first = [
        keys(sequence(TEXT, salt=salt), 1, fingerprint)[0]
        for fingerprint, salt in [(b"a", b""), (b"b", b""), (b"a", b"x"), (b"ax", b"")]
    ]
    assert len(set(first)) == 4


def picture(offset: int, digest: bytes, rows: int = 6) -> RowSpan:
    return RowSpan(offset, rows, rows, digest)


def test_items_that_differ_only_in_their_digest_never_share() -> None:
    one, two = (keys(sequence(TEXT, spans=[picture(2, d)]), 3) for d in (b"one", b"two"))
    assert not set(one) & set(two)


def test_where_an_item_begins_is_in_the_key() -> None:
    one, two = (keys(sequence([7] * 20, spans=[picture(offset, b"d", 1)]), 3) for offset in (2, 3))
    assert not set(one) & set(two)


def test_two_items_are_not_the_same_as_one() -> None:
    spans = ([picture(0, b"d", 2), picture(2, b"d", 2)], [picture(0, b"d", 4)], [picture(0, b"d", 2)])
    assert len({keys(sequence([7] * 20, spans=s), 1)[0] for s in spans}) == 3


def test_an_item_read_by_cross_attention_enters_the_key_at_its_token() -> None:
    one, two = (keys(sequence(TEXT, spans=[RowSpan(5, 40, 40, d, tokens=1)], cross_rows=40), 3) for d in (b"one", b"two"))
    assert one[0] == two[0] and not set(one[1:]) & set(two[1:])


def test_a_block_within_an_atom_is_named_by_all_of_the_atom() -> None:
    """Its tokens read later ones of the atom, so the same beginning is not enough."""
    one, two = (keys(sequence([*TEXT[:9], last, *TEXT[10:]], atoms=[(2, 10)]), 1) for last in (1, 2))
    assert one != two
    assert keys(sequence([*TEXT[:9], 1], atoms=[(4, 10)]), 1) == keys(sequence([*TEXT[:9], 2], atoms=[(4, 10)]), 1)


def test_a_second_turn_finds_the_first_with_its_answer_and_picture() -> None:
    kv = cache()
    first = sequence(TEXT[:14], spans=[picture(3, b"d")])
    compute(kv, first)
    first.append(50)
    assert kv.allocate(first, 15)
    first.append(51)
    first.computed = 16
    kv.settle(first)
    kv.release(first)
    again = sequence([*TEXT[:14], 50, 51, 52, 53], spans=[RowSpan(3, 6, 0, b"d")])
    assert hit(kv, again) == 16
    assert hit(kv, sequence(again.prompt, spans=[picture(3, b"other")])) == 0
    kv.admit(again, 16)
    assert again.ready == 18, "rows that a prefix brought are not waited for"
    assert (again.cached, kv.queries, kv.hits) == (16, 14 + 18, 16)


def test_the_last_token_is_always_computed() -> None:
    kv = cache()
    leave(kv, sequence(TEXT[:16]))
    assert [hit(kv, sequence(TEXT[:n])) for n in (16, 17, 4, 5)] == [12, 16, 0, 4]


def test_an_item_without_a_digest_and_what_stands_behind_it_is_not_shared() -> None:
    kv = cache()
    leave(kv, sequence(TEXT, spans=[picture(9, b"")]))
    assert hit(kv, sequence(TEXT, spans=[picture(9, b"")])) == 8
    assert kv.pools[0].cached == 2


def test_a_sequence_that_is_not_cacheable_neither_reads_nor_writes() -> None:
    kv = cache()
    leave(kv, sequence(TEXT, cacheable=False))
    assert kv.pools[0].cached == 0
    leave(kv, sequence(TEXT))
    assert hit(kv, sequence(TEXT, cacheable=False)) == 0 and hit(kv, sequence(TEXT)) == 16


def test_without_prefix_caching_nothing_stays() -> None:
    kv = KvCache([FULL], 4, enable_prefix_caching=False)
    leave(kv, sequence(TEXT))
    assert hit(kv, sequence(TEXT)) == 0 and kv.pools[0].free == 64 and (kv.queries, kv.hits) == (0, 0)


def test_a_prefix_never_ends_inside_an_atom() -> None:
    kv = cache()
    atoms = [(6, 14)]
    leave(kv, sequence(TEXT, atoms=atoms))
    assert hit(kv, sequence(TEXT, atoms=atoms)) == 16
    assert hit(kv, sequence(TEXT[:14], atoms=atoms)) == 4


def test_a_full_group_needs_every_block() -> None:
    kv = cache()
    s = sequence(TEXT)
    compute(kv, s)
    kv.pools[0].forget(s.tables[0].blocks[2])
    assert hit(kv, sequence(TEXT)) == 8


def test_a_sliding_group_needs_only_what_the_next_token_looks_back_on() -> None:
    kv = cache(SLIDING, FULL)
    s = sequence(TEXT)
    compute(kv, s)
    assert kv.longest_prefix(sequence(TEXT)) == 16
    blocks = [kv.pools[0].find(k) for k in s.keys]
    kv.release(s)
    for block in blocks[:2]:
        assert block is not None
        kv.pools[0].forget(block)
    again = sequence(TEXT)
    assert hit(kv, again) == 16  # token 16 reads tokens 11 to 15
    kv.admit(again, 16)
    assert again.tables[0].blocks == [NO_BLOCK, NO_BLOCK, *blocks[2:4]] and again.tables[1].held == 4
    kv.release(again)
    assert blocks[2] is not None
    kv.pools[0].forget(blocks[2])
    assert hit(kv, sequence(TEXT)) == 0


def test_a_sliding_group_that_lost_the_end_offers_an_earlier_boundary() -> None:
    kv = cache(SLIDING, FULL)
    s = sequence(TEXT)
    compute(kv, s)
    last = kv.pools[0].find(s.keys[3])
    kv.release(s)
    assert last is not None
    kv.pools[0].forget(last)
    assert hit(kv, sequence(TEXT)) == 12


def test_a_pruned_sequence_shares_only_what_stands_before_the_pruned_stretch() -> None:
    kv = cache(FULL, PRUNED)
    leave(kv, sequence(TEXT, dropped=5, drop_from=9))
    assert [p.cached for p in kv.pools] == [2, 2]
    leave(kv, sequence(TEXT))
    assert hit(kv, sequence(TEXT, dropped=5, drop_from=9)) == 8 and hit(kv, sequence(TEXT)) == 16


def test_the_cross_group_takes_no_part() -> None:
    kv = cache(FULL, CROSS)
    s = sequence(TEXT, spans=[RowSpan(5, 10, 10, b"d", tokens=1)], cross_rows=10)
    leave(kv, s)
    assert [p.cached for p in kv.pools] == [5, 0]
    assert hit(kv, sequence(TEXT, spans=s.spans, cross_rows=10)) == 16


@pytest.mark.parametrize("poisoned", [False, True])
def test_poisoned_blocks_are_found_no_more_and_cleared_before_the_next_use(poisoned: bool) -> None:
    kv = KvCache([LayerGroup(Kind.FULL, 5)], 4)
    s = sequence(TEXT)
    compute(kv, s)
    s.append(1)
    kv.release(s, poisoned)
    assert hit(kv, sequence(TEXT)) == (0 if poisoned else 16)
    other = sequence([9] * 20, cacheable=False)
    kv.admit(other, 0)
    assert kv.allocate(other, 20)
    assert kv.take_stale() == ([(0, b) for b in range(5)] if poisoned else [])


def test_blocks_that_others_hold_survive_the_poisoning_of_one_sequence() -> None:
    kv = cache()
    one, two = sequence(TEXT), sequence([*TEXT[:16], 1, 2, 3, 4, 5])
    compute(kv, one)
    compute_two = kv.longest_prefix(two)
    kv.admit(two, compute_two)
    assert kv.allocate(two, two.length)
    kv.release(two, poisoned=True)
    assert compute_two == 16 and hit(kv, sequence(TEXT)) == 16


def test_what_an_unproven_sequence_leaves_is_cleared_even_after_it_was_cached() -> None:
    """Aborted before its first token: its keys stay, its blocks may hold anything and are cleared once evicted."""
    kv = KvCache([LayerGroup(Kind.FULL, 5)], 4)
    compute(kv, s := sequence(TEXT))
    kv.release(s)
    other = sequence([9] * 20)
    kv.admit(other, 0)
    assert kv.allocate(other, 20) and kv.take_stale() == [(0, b) for b in range(5)]


def test_all_groups_are_allocated_or_none() -> None:
    kv = KvCache([LayerGroup(Kind.FULL, 8), LayerGroup(Kind.SLIDING, 2, 6)], 4)
    s = sequence(TEXT)
    kv.admit(s, 0)
    assert not kv.allocate(s, 12)
    assert [p.free for p in kv.pools] == [8, 2] and all(t.blocks == [] for t in s.tables)
    assert kv.allocate(s, 8)


def test_a_sliding_sequence_holds_its_window_and_a_chunk() -> None:
    kv = KvCache([SLIDING], 4)
    s = Sequence("s", list(range(50)), 100, frozenset())
    kv.admit(s, 0)
    most = 0
    while s.length < 150:
        tokens = min(s.computed + 5, s.length)
        assert kv.allocate(s, tokens)
        most = max(most, s.tables[0].held)
        s.computed = tokens
        kv.settle(s)
        if s.computed == s.length:
            s.append(1)
    assert most <= -(-(6 + 5) // 4) + 1 and kv.fits_ever(s, 5) is None
    small = KvCache([LayerGroup(Kind.SLIDING, 3, 6)], 4)
    assert small.fits_ever(s, 5) == (small.groups[0], 4, 3)
