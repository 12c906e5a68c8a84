"""Refs: what each one holds, for how long, and who waits for it.

An entry is pending (no header), has rows ready (a header and some parts), and ends done or failed; a dropped entry has
failed with NOT_FOUND for whoever still reads it. Its lease runs while nobody reads it. Knows nothing of messages or of
how rows are made. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import torch

from services.common.errors import ServiceError
from services.encoder import metrics
from services.encoder.features import Features
from services.models.media import Grid


@dataclass(frozen=True)
class Header:
    """What an item's rows are.

    Attributes:
        rows: rows of each feature.
        grid: how they are arranged.
        features: elements per row and element type of each feature.
    """

    rows: int
    grid: Grid
    features: tuple[tuple[int, torch.dtype], ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the widest feature."""
        return max(hidden * dtype.itemsize for hidden, dtype in self.features)


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of every feature."""

    start: int
    stop: int
    features: Features  # each [stop - start, hidden]


@dataclass(frozen=True)
class Done:
    """All rows are there; seconds that it took, waiting included."""

    preprocess_seconds: float
    encode_seconds: float


@dataclass(eq=False)
class Entry:
    """One ref. Only the store changes it."""

    ref_id: str
    held_bytes: int
    header: Header | None = None
    parts: list[Part] = field(default_factory=list)
    done: Done | None = None
    error: ServiceError | None = None
    work: asyncio.Task[None] | None = None
    readers: list[asyncio.Event] = field(default_factory=list)
    lease: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        """Whether it is still being encoded."""
        return self.done is None and self.error is None

    @property
    def ready_rows(self) -> int:
        """Rows that can be read; they are always the first ones."""
        return self.parts[-1].stop if self.parts else 0


class Store:
    """All refs of the process.

    Attributes:
        held_bytes: bytes of media and embeddings that entries hold.
        encoded_items: entries that were ever done.
        empty: set while there are no entries.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._entries: dict[str, Entry] = {}
        self.held_bytes = 0
        self.encoded_items = 0
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pending_items(self) -> int:
        """Entries that are still being encoded."""
        return sum(entry.pending for entry in self._entries.values())

    def add(self, media_bytes: int) -> Entry:
        """A new pending entry; its lease starts."""
        entry = Entry(uuid.uuid4().hex, 0)
        self._entries[entry.ref_id] = entry
        self.empty.clear()
        self.hold(entry, media_bytes)
        self._start_lease(entry)
        metrics.refs.set(len(self))
        return entry

    def hold(self, entry: Entry, nbytes: int) -> None:
        """Say how much memory the entry takes now."""
        self.held_bytes += nbytes - entry.held_bytes
        entry.held_bytes = nbytes
        metrics.held_bytes.set(self.held_bytes)

    def open(self, entry: Entry, header: Header) -> None:
        """Rows will follow; from here on the entry holds nothing but rows."""
        entry.header = header
        self.hold(entry, 0)
        self._wake(entry)

    def append(self, entry: Entry, features: Features) -> None:
        """The next rows of every feature are ready."""
        assert entry.header is not None and entry.pending, "append comes between open and finish"
        start = entry.ready_rows
        part = Part(start, start + features[0].shape[0], features)
        assert part.stop <= entry.header.rows, f"rows up to {part.stop} of {entry.header.rows}"
        entry.parts.append(part)
        self.hold(entry, entry.held_bytes + sum(rows.nbytes for rows in features))
        self._wake(entry)

    def finish(self, entry: Entry, done: Done) -> None:
        """All rows are there."""
        assert entry.header is not None and entry.ready_rows == entry.header.rows, "finish comes after the last row"
        entry.done = done
        self.encoded_items += 1
        self._wake(entry)

    def fail(self, entry: Entry, error: ServiceError) -> None:
        """There will be no more rows; what was held is freed, the error stays until the lease ends."""
        error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames hold the media
        entry.error = error
        entry.parts.clear()
        self.hold(entry, 0)
        self._wake(entry)

    def drop(self, ref_ids: Sequence[str]) -> None:
        """Forget refs, cancel their work and free what they hold; unknown ids are ignored."""
        for ref_id in ref_ids:
            entry = self._entries.pop(ref_id, None)
            if entry is None:
                continue
            if entry.work is not None:
                entry.work.cancel()
            self._stop_lease(entry)
            self.fail(entry, self.not_found(ref_id))
        if not self._entries:
            self.empty.set()
        metrics.refs.set(len(self))

    def clear(self) -> None:
        """Drop everything."""
        self.drop(list(self._entries))

    def not_found(self, ref_id: str) -> ServiceError:
        """The error of a ref that is not held."""
        return ServiceError(
            grpc.StatusCode.NOT_FOUND,
            f"this ref is not held here: it was released, nobody fetched it for {self._lease_seconds:g} s, or another "
            "encoder issued it; encode the item again",
            reason="REF_NOT_FOUND",
            metadata={"ref_id": ref_id},
        )

    @contextmanager
    def reading(self, ref_ids: Sequence[str], wake: asyncio.Event) -> Iterator[list[Entry | None]]:
        """Entries whose lease stands still; every change to one of them sets ``wake``."""
        entries = [self._entries.get(ref_id) for ref_id in ref_ids]
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            self._stop_lease(entry)
            entry.readers.append(wake)
        try:
            yield entries
        finally:
            for entry in held:
                entry.readers.remove(wake)
                if not entry.readers and entry.ref_id in self._entries:
                    self._start_lease(entry)

    def check_integrity(self) -> None:
        """Assert that the totals are the sums of the entries and that every unread entry has a lease."""
        assert self.held_bytes == sum(entry.held_bytes for entry in self._entries.values())
        assert all(bool(entry.readers) != (entry.lease is not None) for entry in self._entries.values())

    def _wake(self, entry: Entry) -> None:
        for reader in entry.readers:
            reader.set()

    def _start_lease(self, entry: Entry) -> None:
        self._stop_lease(entry)
        entry.lease = asyncio.get_running_loop().call_later(self._lease_seconds, self.drop, [entry.ref_id])

    def _stop_lease(self, entry: Entry) -> None:
        if entry.lease is not None:
            entry.lease.cancel()
            entry.lease = None
