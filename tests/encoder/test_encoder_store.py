"""Refs, leases and readers, with rows made up here."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest
import torch

from services.common.errors import ServiceError
from services.encoder.reader import Event, Rows, read
from services.encoder.store import Done, Entry, Header, Store
from services.models.media import Grid

HIDDEN = 4  # float32: 16 bytes a row
pytestmark = pytest.mark.asyncio


def header(rows: int, features: int = 1) -> Header:
    return Header(rows, Grid(1, 1, rows), ((HIDDEN, torch.float32),) * features)


def matrix(rows: int, first: int = 0) -> torch.Tensor:
    """Row i is full of first + i."""
    return torch.arange(first, first + rows, dtype=torch.float32)[:, None].expand(rows, HIDDEN).contiguous()


def complete(store: Store, entry: Entry, rows: int) -> None:
    store.open(entry, header(rows))
    store.append(entry, [matrix(rows)])
    store.finish(entry, Done(0.1, 0.2))


async def collect(store: Store, *wanted: tuple[str, int], chunk: int = 1000) -> list[tuple[int, Event]]:
    async with aclosing(read(store, wanted, chunk)) as events:
        return [event async for event in events]


def row_numbers(events: list[tuple[int, Event]], item: int = 0, feature: int = 0) -> list[int]:
    parts = [e.rows for i, e in events if i == item and isinstance(e, Rows) and e.feature == feature]
    return torch.cat(parts)[:, 0].int().tolist()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_chunks_are_as_large_as_allowed_and_hold_at_least_one_row() -> None:
    store = Store(10)
    entry = store.add(0)
    complete(store, entry, 7)
    for limit, sizes in ((1000, [7]), (48, [3, 3, 1]), (63, [3, 3, 1]), (16, [1] * 7), (1, [1] * 7)):
        events = await collect(store, (entry.ref_id, 0), chunk=limit)
        assert [e.rows.shape[0] for _, e in events if isinstance(e, Rows)] == sizes
        assert row_numbers(events) == list(range(7))
        assert events[0][1] == header(7) and events[-1][1] == Done(0.1, 0.2)


@pytest.mark.parametrize("start", [0, 3, 6])
async def test_a_reader_resumes_at_a_row(start: int) -> None:
    store = Store(10)
    entry = store.add(0)
    complete(store, entry, 7)
    events = await collect(store, (entry.ref_id, start), chunk=32)
    assert row_numbers(events) == list(range(start, 7))


async def test_resuming_after_the_last_row_gives_no_rows_and_beyond_it_an_error() -> None:
    store = Store(10)
    entry = store.add(0)
    complete(store, entry, 7)
    assert [type(e) for _, e in await collect(store, (entry.ref_id, 7))] == [Header, Done]
    ((_, error),) = await collect(store, (entry.ref_id, 8))
    assert isinstance(error, ServiceError) and error.field == "items[0].start_row"


async def test_rows_of_all_features_come_together() -> None:
    store = Store(10)
    entry = store.add(0)
    store.open(entry, header(4, features=2))
    store.append(entry, [matrix(4), matrix(4, 100)])
    store.finish(entry, Done(0, 0))
    events = await collect(store, (entry.ref_id, 0), chunk=32)
    assert [(e.feature, e.start) for _, e in events if isinstance(e, Rows)] == [(0, 0), (1, 0), (0, 2), (1, 2)]
    assert row_numbers(events, feature=1) == [100, 101, 102, 103]


async def test_rows_are_read_while_the_rest_is_being_made() -> None:
    store = Store(10)
    entry = store.add(0)
    async with aclosing(read(store, [(entry.ref_id, 1)], 1000)) as events:
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
    entry = store.add(0)
    readers = [asyncio.create_task(collect(store, (entry.ref_id, 0), chunk=chunk)) for chunk in (16, 1000)]
    await settled()
    complete(store, entry, 6)
    assert [row_numbers(await reader) for reader in readers] == [list(range(6))] * 2


async def test_items_come_in_the_order_in_which_they_finish() -> None:
    store = Store(10)
    entries = [store.add(0) for _ in range(3)]
    reader = asyncio.create_task(collect(store, *[(e.ref_id, 0) for e in entries]))
    for index in (2, 0, 1):
        await settled()
        complete(store, entries[index], index + 1)
    events = await reader
    assert [index for index, event in events if isinstance(event, Done)] == [2, 0, 1]
    assert [row_numbers(events, index) for index in range(3)] == [[0], [0, 1], [0, 1, 2]]


async def test_one_items_error_leaves_the_others_alone() -> None:
    store = Store(10)
    good, bad = store.add(0), store.add(0)
    store.fail(bad, ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "bad"))
    complete(store, good, 2)
    events = await collect(store, (bad.ref_id, 0), ("unknown", 0), (good.ref_id, 0))
    errors = {index: event for index, event in events if isinstance(event, ServiceError)}
    assert errors[0].message == "bad"
    assert (errors[1].code, errors[1].reason) == (grpc.StatusCode.NOT_FOUND, "REF_NOT_FOUND")
    assert row_numbers(events, 2) == [0, 1]


async def test_held_bytes_follow_the_item() -> None:
    store = Store(10)
    entry = store.add(500)
    assert store.held_bytes == 500
    store.hold(entry, 900)
    assert store.held_bytes == 900
    complete(store, entry, 3)
    assert store.held_bytes == 3 * HIDDEN * 4
    store.check_integrity()
    store.drop([entry.ref_id, entry.ref_id, "unknown"])
    assert (store.held_bytes, len(store), store.pending_items, store.encoded_items) == (0, 0, 0, 1)
    store.check_integrity()


async def test_dropping_cancels_work_and_tells_readers() -> None:
    store = Store(10)
    entry = store.add(100)
    entry.work = asyncio.create_task(asyncio.sleep(60))
    reader = asyncio.create_task(collect(store, (entry.ref_id, 0)))
    await settled()
    store.drop([entry.ref_id])
    ((_, error),) = await reader
    assert isinstance(error, ServiceError) and error.reason == "REF_NOT_FOUND"
    await settled()
    assert entry.work.cancelled()
    assert store.held_bytes == 0


async def test_an_unread_ref_is_dropped_when_its_lease_ends() -> None:
    store = Store(0.05)
    entry = store.add(100)
    entry.work = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0.1)
    assert (len(store), store.held_bytes, entry.work.cancelled()) == (0, 0, True)


async def test_the_lease_stands_still_while_somebody_reads_and_starts_again_after() -> None:
    store = Store(0.05)
    entry = store.add(0)
    readers = [asyncio.create_task(collect(store, (entry.ref_id, 0))) for _ in range(2)]
    await asyncio.sleep(0.12)
    assert len(store) == 1
    readers[0].cancel()
    await asyncio.gather(readers[0], return_exceptions=True)
    await asyncio.sleep(0.12)
    assert len(store) == 1 and len(entry.readers) == 1
    store.check_integrity()
    complete(store, entry, 1)
    await readers[1]
    assert entry.readers == [] and len(store) == 1
    await asyncio.sleep(0.12)
    assert len(store) == 0


async def test_a_stored_error_keeps_no_frames_alive() -> None:
    store = Store(10)
    entry = store.add(0)
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise ServiceError(grpc.StatusCode.INTERNAL, "outer") from inner
    except ServiceError as error:
        store.fail(entry, error)
    await collect(store, (entry.ref_id, 0))
    assert entry.error is not None
    assert (entry.error.__traceback__, entry.error.__cause__, entry.error.__context__) == (None, None, None)
