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
from services.common.shared_memory import Address
from services.encoder.store import Done, Header, Ref, Store


@dataclass(frozen=True)
class Shared:
    """Header of an item whose rows are read where they lie."""

    header: Header
    address: Address


@dataclass(frozen=True)
class Ready:
    """The first ``rows`` rows of every feature can be read where they lie."""

    rows: int


@dataclass(frozen=True)
class Chunk:
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


Event = Header | Shared | Chunk | Ready | Done | ServiceError


async def read(
    store: Store, wanted: Sequence[tuple[str, int]], max_chunk_bytes: int, *, shared: bool = False
) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of refs as they come, each with the index of its ref.

    An item starts with its header and ends with ``Done`` or an error; others go on. Close the iterator to leave early.

    Args:
        store: where the refs are.
        wanted: ref id and first row wanted.
        max_chunk_bytes: a chunk of rows is not larger, unless a single row is.
        shared: whether the reader can open this process's memory: rows that lie in such are not sent.
    """
    wake = asyncio.Event()
    with store.reading([ref_id for ref_id, _ in wanted], wake) as reading:
        items: dict[int, Iterator[Event | None]] = {}
        for index, ((ref_id, start_row), ref) in enumerate(zip(wanted, reading.refs, strict=True)):
            if ref is None:
                with reading.busy():
                    yield index, store.not_found(ref_id)
            else:
                items[index] = _Item(ref, start_row, max_chunk_bytes, shared, f"items[{index}].start_row").events()
        while items:
            wake.clear()
            found = _first(items)
            if found is None:
                await wake.wait()
                continue
            index, event = found
            if isinstance(event, Done | ServiceError):
                del items[index]
            with reading.busy():
                yield index, event


def _first(items: dict[int, Iterator[Event | None]]) -> tuple[int, Event] | None:
    """The next event of the earliest item that has one."""
    for index, events in items.items():
        if (event := next(events)) is not None:
            return index, event
    return None


@dataclass(frozen=True)
class _Item:
    """What one reader wants of one ref."""

    ref: Ref
    start_row: int
    max_chunk_bytes: int
    shared: bool
    field: str

    @property
    def error(self) -> ServiceError | None:
        return self.ref.error or self.ref.entry.error

    def events(self) -> Iterator[Event | None]:
        """All events; None wherever the next one is not there yet."""
        entry = self.ref.entry
        while entry.header is None and self.error is None:
            yield None
        if entry.header is not None and self.error is None:
            header = entry.header
            if self.start_row > header.rows:
                yield invalid(self.field, f"row {self.start_row} is wanted of an item of {header.rows} rows")
                return
            assert entry.rows is not None, "an item with a header and no error has rows"
            address = entry.rows.address if self.shared else None
            if address is None:
                yield header
                yield from self._chunks(header)
            else:
                yield Shared(header, address)
                yield from self._ready(header)
        while entry.pending and self.error is None:
            yield None
        yield self.error or (Done(0.0, 0.0) if self.ref.found_done else entry.done)

    def _chunks(self, header: Header) -> Iterator[Event | None]:
        """Rows, at most a chunk at a time and all features of them before the next; ends early on an error."""
        entry, row = self.ref.entry, self.start_row
        step = max(1, self.max_chunk_bytes // header.row_bytes)
        while row < header.rows and self.error is None:
            stop = min(row + step, entry.ready_rows)
            if stop <= row:
                yield None
                continue
            assert entry.rows is not None
            for index, feature in enumerate(entry.rows.features):
                yield Chunk(index, row, header.rows, feature[row:stop])
            row = stop

    def _ready(self, header: Header) -> Iterator[Event | None]:
        """How many rows are there, each time that it is more."""
        entry, row = self.ref.entry, self.start_row
        while row < header.rows and self.error is None:
            if entry.ready_rows <= row:
                yield None
                continue
            row = entry.ready_rows
            yield Ready(row)
