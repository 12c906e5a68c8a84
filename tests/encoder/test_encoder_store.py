"""Refs, leases and readers, with rows made up here."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import aclosing
from random import Random

import grpc
import pytest
import torch

from services.common.errors import ServiceError
from services.common.shared_memory import Block
from services.encoder.reader import Chunk, Event, Ready, Shared, read
from services.encoder.rows import SHARED_FROM
from services.encoder.store import Done, Entry, Header, Ref, Store
from services.models.media import Grid
from tests.patience import PATIENCE

HIDDEN = 4  # float32: 16 bytes a row
pytestmark = pytest.mark.asyncio


def header(rows: int, features: int = 1) -> Header:
    return Header(rows, Grid(1, 1, rows), ((HIDDEN, torch.float32),) * features)


def matrix(rows: int, first: int = 0) -> torch.Tensor:
    """Row i is full of first + i."""
    return torch.arange(first, first + rows, dtype=torch.float32)[:, None].expand(rows, HIDDEN).contiguous()


def add(store: Store, media_bytes: int, key: bytes = b"") -> Ref:
    """A ref to an item that is like no other, unless a key is given."""
    return store.claim(key or uuid.uuid4().bytes, media_bytes)


def complete(store: Store, entry: Entry, rows: int) -> None:
    store.open(entry, header(rows))
    store.append(entry, [matrix(rows)])
    store.finish(entry, Done(0.1, 0.2))


async def collect(store: Store, *wanted: tuple[str, int], chunk: int = 1000) -> list[tuple[int, Event]]:
    async with aclosing(read(store, wanted, chunk)) as events:
        return [event async for event in events]


def row_numbers(events: list[tuple[int, Event]], item: int = 0, feature: int = 0) -> list[int]:
    parts = [e.rows for i, e in events if i == item and isinstance(e, Chunk) and e.feature == feature]
    return torch.cat(parts)[:, 0].int().tolist()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_chunks_are_as_large_as_allowed_and_hold_at_least_one_row() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    complete(store, entry, 7)
    for limit, sizes in ((1000, [7]), (48, [3, 3, 1]), (63, [3, 3, 1]), (16, [1] * 7), (1, [1] * 7)):
        events = await collect(store, (ref.ref_id, 0), chunk=limit)
        assert [e.rows.shape[0] for _, e in events if isinstance(e, Chunk)] == sizes
        assert row_numbers(events) == list(range(7))
        assert events[0][1] == header(7) and events[-1][1] == Done(0.1, 0.2)


@pytest.mark.parametrize("start", [0, 3, 6])
async def test_a_reader_resumes_at_a_row(start: int) -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    complete(store, entry, 7)
    events = await collect(store, (ref.ref_id, start), chunk=32)
    assert row_numbers(events) == list(range(start, 7))


async def test_resuming_after_the_last_row_gives_no_rows_and_beyond_it_an_error() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    complete(store, entry, 7)
    assert [type(e) for _, e in await collect(store, (ref.ref_id, 7))] == [Header, Done]
    ((_, error),) = await collect(store, (ref.ref_id, 8))
    assert isinstance(error, ServiceError) and error.field == "items[0].start_row"


async def test_rows_of_all_features_come_together() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    store.open(entry, header(4, features=2))
    store.append(entry, [matrix(4), matrix(4, 100)])
    store.finish(entry, Done(0, 0))
    events = await collect(store, (ref.ref_id, 0), chunk=32)
    assert [(e.feature, e.start) for _, e in events if isinstance(e, Chunk)] == [(0, 0), (1, 0), (0, 2), (1, 2)]
    assert row_numbers(events, feature=1) == [100, 101, 102, 103]


async def test_rows_are_copied_so_that_an_item_keeps_no_batch_alive() -> None:
    store = Store(10)
    ref, rows = add(store, 0), matrix(2)
    store.open(ref.entry, header(2))
    store.append(ref.entry, [rows])
    rows.zero_()
    store.finish(ref.entry, Done(0, 0))
    assert row_numbers(await collect(store, (ref.ref_id, 0))) == [0, 1]


async def test_rows_are_read_while_the_rest_is_being_made() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    async with aclosing(read(store, [(ref.ref_id, 1)], 1000)) as events:
        first = asyncio.ensure_future(anext(events))
        await settled()
        assert not first.done()
        store.open(entry, header(5))
        assert await first == (0, header(5))
        store.append(entry, [matrix(2)])
        assert (await anext(events))[1].rows[:, 0].tolist() == [1]
        store.append(entry, [matrix(3, 2)])
        assert (await anext(events))[1].rows[:, 0].tolist() == [2, 3, 4]
        last = asyncio.ensure_future(anext(events))
        await settled()
        assert not last.done()
        store.finish(entry, Done(1, 2))
        assert await last == (0, Done(1, 2))


async def test_two_readers_both_get_all_rows() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    readers = [asyncio.create_task(collect(store, (ref.ref_id, 0), chunk=chunk)) for chunk in (16, 1000)]
    await settled()
    complete(store, entry, 6)
    assert [row_numbers(await reader) for reader in readers] == [list(range(6))] * 2


async def test_items_come_in_the_order_in_which_they_finish() -> None:
    store = Store(10)
    refs = [add(store, 0) for _ in range(3)]
    reader = asyncio.create_task(collect(store, *[(ref.ref_id, 0) for ref in refs]))
    for index in (2, 0, 1):
        await settled()
        complete(store, refs[index].entry, index + 1)
    events = await reader
    assert [index for index, event in events if isinstance(event, Done)] == [2, 0, 1]
    assert [row_numbers(events, index) for index in range(3)] == [[0], [0, 1], [0, 1, 2]]


async def test_one_items_error_leaves_the_others_alone() -> None:
    store = Store(10)
    good, bad = add(store, 0), add(store, 0)
    store.fail(bad.entry, ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "bad"))
    complete(store, good.entry, 2)
    events = await collect(store, (bad.ref_id, 0), ("unknown", 0), (good.ref_id, 0))
    errors = {index: event for index, event in events if isinstance(event, ServiceError)}
    assert errors[0].message == "bad"
    assert (errors[1].code, errors[1].reason) == (grpc.StatusCode.NOT_FOUND, "REF_NOT_FOUND")
    assert row_numbers(events, 2) == [0, 1]


async def test_held_bytes_follow_the_item() -> None:
    store = Store(10)
    ref = add(store, 500)
    entry = ref.entry
    assert store.held_bytes == 500
    store.hold(entry, 900)
    assert store.held_bytes == 900
    complete(store, entry, 4)
    assert store.held_bytes == 4 * HIDDEN * 4
    store.check_integrity()
    store.drop([ref.ref_id, ref.ref_id, "unknown"])
    assert (store.held_bytes, len(store), store.pending_items, store.encoded_items) == (0, 0, 0, 1)
    store.check_integrity()


async def test_dropping_cancels_work_and_tells_readers() -> None:
    store = Store(10)
    ref = add(store, 100)
    entry = ref.entry
    entry.work = work = asyncio.create_task(asyncio.sleep(60))
    reader = asyncio.create_task(collect(store, (ref.ref_id, 0)))
    await settled()
    store.drop([ref.ref_id])
    ((_, error),) = await reader
    assert isinstance(error, ServiceError) and error.reason == "REF_NOT_FOUND"
    await settled()
    assert work.cancelled()
    assert store.held_bytes == 0


async def test_an_unread_ref_is_dropped_when_its_lease_ends() -> None:
    store = Store(0.05)
    ref = add(store, 100)
    entry = ref.entry
    entry.work = work = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0.1)
    assert (len(store), store.held_bytes, work.cancelled()) == (0, 0, True)


async def test_the_lease_stands_still_while_somebody_reads_and_starts_again_after() -> None:
    store = Store(0.05)
    ref = add(store, 0)
    entry = ref.entry
    readers = [asyncio.create_task(collect(store, (ref.ref_id, 0))) for _ in range(2)]
    await asyncio.sleep(0.12)
    assert len(store) == 1
    readers[0].cancel()
    await asyncio.gather(readers[0], return_exceptions=True)
    await asyncio.sleep(0.12)
    assert len(store) == 1 and len(ref.readers) == 1
    store.check_integrity()
    complete(store, entry, 1)
    await readers[1]
    assert ref.readers == [] and len(store) == 1
    await asyncio.sleep(0.12)
    assert len(store) == 0


async def test_a_reader_that_stops_at_an_unknown_ref_holds_no_other() -> None:
    store = Store(0.05)
    ref = add(store, 0)
    async with aclosing(read(store, [("unknown", 0), (ref.ref_id, 0)], 1000)) as events:
        assert isinstance((await anext(events))[1], ServiceError)
        await asyncio.wait_for(store.empty.wait(), PATIENCE)


async def test_a_stored_error_keeps_no_frames_alive() -> None:
    store = Store(10)
    ref = add(store, 0)
    entry = ref.entry
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise ServiceError(grpc.StatusCode.INTERNAL, "outer") from inner
    except ServiceError as error:
        store.fail(entry, error)
    await collect(store, (ref.ref_id, 0))
    assert entry.error is not None
    assert (entry.error.__traceback__, entry.error.__cause__, entry.error.__context__) == (None, None, None)


def done_item(store: Store, key: bytes, rows: int = 4) -> Ref:
    ref = add(store, 10, key)
    complete(store, ref.entry, rows)
    return ref


async def test_what_is_under_way_or_done_is_found_again_and_held_by_every_ref() -> None:
    store = Store(10, 10_000)
    first, second = add(store, 100, b"key"), add(store, 100, b"key")
    assert (first.found, second.found, store.pending_items, store.held_bytes) == (False, True, 1, 100)
    complete(store, first.entry, 4)
    third = add(store, 100, b"key")
    assert (store.hits, store.misses, store.held_bytes) == (2, 1, 64)
    store.drop([first.ref_id])
    assert [row_numbers(await collect(store, (ref.ref_id, 0))) for ref in (second, third)] == [[0, 1, 2, 3]] * 2
    ends = [(await collect(store, (ref.ref_id, 0)))[-1][1] for ref in (second, third)]
    assert ends == [Done(0.1, 0.2), Done(0.0, 0.0)]  # what was there took no time
    store.check_integrity()


async def test_work_goes_on_while_anybody_holds_it_and_stops_with_the_last() -> None:
    store = Store(10, 10_000)
    first, second = add(store, 100, b"key"), add(store, 100, b"key")
    work = first.entry.work = asyncio.create_task(asyncio.sleep(60))
    store.drop([first.ref_id])
    await settled()
    assert not work.done() and store.held_bytes == 100
    store.drop([second.ref_id])
    await settled()
    assert work.cancelled() and (store.held_bytes, store.cached_items, b"key" in store) == (0, 0, False)
    store.check_integrity()


async def test_a_failed_item_is_tried_again_by_who_asks_next() -> None:
    store = Store(10, 10_000)
    bad = add(store, 100, b"key")
    store.fail(bad.entry, ServiceError(grpc.StatusCode.INTERNAL, "bad"))
    again = add(store, 100, b"key")
    assert not again.found and again.entry is not bad.entry
    complete(store, again.entry, 2)
    assert row_numbers(await collect(store, (again.ref_id, 0))) == [0, 1]
    ((_, error),) = await collect(store, (bad.ref_id, 0))
    assert isinstance(error, ServiceError) and error.message == "bad"
    store.check_integrity()


async def test_the_longest_unused_goes_first_and_nothing_held_goes() -> None:
    store = Store(10, 3 * 64)  # three items of 4 rows
    held = done_item(store, b"held")
    store.drop([done_item(store, name).ref_id for name in (b"a", b"b", b"c")])
    assert (store.cached_items, store.cached_bytes, store.held_bytes) == (3, 192, 64)
    store.drop([add(store, 0, b"a").ref_id])  # used again
    store.drop([done_item(store, b"d").ref_id])
    assert [name in store for name in (b"held", b"a", b"b", b"c", b"d")] == [True, True, False, True, True]
    assert store.evictions == 1
    assert store.make_room(100, 300) and store.cached_items == 2
    assert not store.make_room(1000, 300) and store.cached_items == 0
    assert row_numbers(await collect(store, (held.ref_id, 0))) == [0, 1, 2, 3]
    store.check_integrity()
    store.drop([held.ref_id])
    assert store.cached_items == 1
    store.clear()
    assert (len(store), store.held_bytes, store.cached_bytes) == (0, 0, 0)


async def test_an_item_larger_than_the_cache_is_not_kept() -> None:
    store = Store(10, 100)
    store.drop([done_item(store, b"large", 16).ref_id])
    assert (store.cached_items, store.cached_bytes, b"large" in store) == (0, 0, False)


async def test_rows_in_shared_memory_are_announced_and_not_sent() -> None:
    store = Store(10, shared_items=2)
    rows = SHARED_FROM // (HIDDEN * 4)
    ref = add(store, 0)
    reader = asyncio.create_task(collect_shared(store, ref))
    await settled()
    store.open(ref.entry, header(rows))
    store.append(ref.entry, [matrix(rows - 10)])
    await settled()
    store.append(ref.entry, [matrix(10, rows - 10)])
    store.finish(ref.entry, Done(0, 0))
    events = await reader
    assert isinstance(events[0], Shared) and events[0].address.nbytes == SHARED_FROM
    assert events[1:] == [Ready(rows - 10), Ready(rows), Done(0, 0)]
    small = done_item(store, b"small")
    assert [type(event) for event in await collect_shared(store, small)] == [Header, Chunk, Done]
    assert [type(event) for _, event in await collect(store, (ref.ref_id, rows - 1), chunk=10**9)] == [Header, Chunk, Done]
    second, third = done_item(store, b"second", rows), done_item(store, b"third", rows)
    kinds = [type((await collect_shared(store, ref))[0]) for ref in (second, third)]
    assert kinds == [Shared, Header], "two descriptors are all there are"
    store.drop([second.ref_id])
    fourth = done_item(store, b"fourth", rows)
    assert isinstance((await collect_shared(store, fourth))[0], Shared)


async def test_rows_are_sent_where_a_block_cannot_be_mapped_and_no_descriptor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "path", "/proc/is/not/here")
    before = len(os.listdir("/proc/self/fd"))
    store = Store(10, shared_items=2)
    ref = done_item(store, b"key", SHARED_FROM // (HIDDEN * 4))
    assert len(os.listdir("/proc/self/fd")) == before
    assert isinstance((await collect_shared(store, ref))[0], Header)


async def collect_shared(store: Store, ref: Ref) -> list[Event]:
    async with aclosing(read(store, [(ref.ref_id, 0)], 1000, shared=True)) as events:
        return [event async for _, event in events]


async def test_readers_that_leave_anywhere_leave_nothing_behind() -> None:
    """1,000 readers of items in all states leave after so many events; refs are dropped now and then, by lease or by call."""
    random = Random(5)
    store = Store(10, 640)
    names = [b"%d" % number for number in range(40)]
    for _ in range(1000):
        refs = [add(store, 32, random.choice(names)) for _ in range(random.randint(1, 3))]
        fresh = list({ref.entry for ref in refs if ref.entry.pending and ref.entry.work is None})
        for entry in fresh:
            entry.work = asyncio.create_task(slowly(store, entry, random))
        taken, most = 0, random.randint(0, 12)
        async with aclosing(read(store, [(ref.ref_id, random.randint(0, 4)) for ref in refs], 32)) as events:
            while taken < most and await anext(events, None) is not None:
                taken += 1
        store.check_integrity()
        store.drop([ref.ref_id for ref in refs if random.random() < 0.9])
    store.drop(list(store._refs))
    await settled()
    store.check_integrity()
    assert (len(store), store.held_bytes, store.pending_items) == (0, 0, 0)
    assert len(asyncio.all_tasks()) == 1
    assert store.hits > 1000 and store.evictions > 20


async def slowly(store: Store, entry: Entry, random: Random) -> None:
    await asyncio.sleep(0)
    if random.random() < 0.1:
        store.fail(entry, ServiceError(grpc.StatusCode.INTERNAL, "bad"))
        return
    rows = random.randint(4, 8)
    store.open(entry, header(rows))
    for row in range(rows):
        await asyncio.sleep(0)
        store.append(entry, [matrix(1, row)])
    store.finish(entry, Done(0, 0))
