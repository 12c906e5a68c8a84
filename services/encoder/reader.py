"""One reader of several refs: their events in an order that lets a prefill start early. Knows nothing of messages.

Of the events that are there, the one of the earliest item comes first: rows of the prompt's first picture are of use
before those of its second. Items whose rows are not there yet hold nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import torch

from services.common.errors import ServiceError, invalid
from services.encoder.store import Done, Entry, Header, Store


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one feature.

    Attributes:
        feature: index of the feature.
        start: index of the first of these rows.
        total: rows of the whole feature.
        rows: a view of what the store holds.
    """

    feature: int
    start: int
    total: int
    rows: torch.Tensor  # [num_rows, hidden]


Event = Header | Rows | Done | ServiceError


async def read(store: Store, wanted: Sequence[tuple[str, int]], max_chunk_bytes: int) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of refs as they come, each with the index of its ref.

    An item starts with its header and ends with ``Done`` or an error; others go on. Close the iterator to leave early.

    Args:
        store: where the refs are.
        wanted: ref id and first row wanted.
        max_chunk_bytes: a chunk of rows is not larger, unless a single row is.
    """
    wake = asyncio.Event()
    with store.reading([ref_id for ref_id, _ in wanted], wake) as entries:
        items: dict[int, Iterator[Event | None]] = {}
        for index, ((ref_id, start_row), entry) in enumerate(zip(wanted, entries, strict=True)):
            if entry is None:
                yield index, store.not_found(ref_id)
            else:
                items[index] = _events(entry, start_row, max_chunk_bytes, f"items[{index}].start_row")
        while items:
            wake.clear()
            found = _first(items)
            if found is None:
                await wake.wait()
                continue
            index, event = found
            if isinstance(event, Done | ServiceError):
                del items[index]
            yield index, event


def _first(items: dict[int, Iterator[Event | None]]) -> tuple[int, Event] | None:
    """The next event of the earliest item that has one."""
    for index, events in items.items():
        if (event := next(events)) is not None:
            return index, event
    return None


def _events(entry: Entry, start_row: int, max_chunk_bytes: int, field: str) -> Iterator[Event | None]:
    """The events of one item; None wherever the next one is not there yet."""
    while entry.header is None and entry.error is None:
        yield None
    if entry.header is not None and entry.error is None:
        header = entry.header
        if start_row > header.rows:
            yield invalid(field, f"row {start_row} is wanted of an item of {header.rows} rows")
            return
        yield header
        yield from _rows(entry, header, start_row, max(1, max_chunk_bytes // header.row_bytes))
    while entry.pending:
        yield None
    yield entry.error or entry.done


def _rows(entry: Entry, header: Header, row: int, step: int) -> Iterator[Event | None]:
    """Rows from ``row`` on, at most ``step`` at a time and all features of them before the next; ends early on an error."""
    while row < header.rows:
        if entry.error is not None:
            return
        part = next((part for part in entry.parts if part.start <= row < part.stop), None)
        if part is None:
            yield None
            continue
        stop = min(row + step, part.stop)
        for index, feature in enumerate(part.features):
            yield Rows(index, row, header.rows, feature[row - part.start : stop - part.start])
        row = stop
