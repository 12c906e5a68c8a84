"""Items that are being encoded or are encoded, by what they show; and refs, through which callers hold them.

An item is pending (no rows), has the first of its rows ready, and ends done or failed. Several refs may hold one item: what is
asked for again is not encoded again. An item that is done and that no ref holds stays as long as there is room; one that
is not done is dropped with its last ref. A ref's lease runs while nobody reads through it. Knows nothing of messages or of
how rows are made. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import torch

from services.common.errors import ServiceError
from services.encoder import metrics
from services.encoder.features import Features
from services.encoder.rows import Rows
from services.models.media import Grid


@dataclass(frozen=True)
class Header:
    """What an item's rows are.

    Attributes:
        rows: rows of each feature.
        grid: how they are arranged.
        features: elements per row and element type of each feature.
        kept: of a pruned item, which of its whole rows these are.
    """

    rows: int
    grid: Grid
    features: tuple[tuple[int, torch.dtype], ...]
    kept: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the widest feature."""
        return max(hidden * dtype.itemsize for hidden, dtype in self.features)


@dataclass(frozen=True)
class Done:
    """All rows are there; seconds that it took, waiting included."""

    preprocess_seconds: float
    encode_seconds: float


@dataclass(eq=False)
class Entry:
    """One item. Only the store changes it.

    Attributes:
        key: names what its rows show.
        held_bytes: memory that it takes: its file, the towers' inputs, its rows.
        header, rows: once rows are to come.
        ready_rows: rows that can be read; they are always the first ones.
        work: what encodes it.
        refs: who holds it.
    """

    key: bytes
    held_bytes: int = 0
    header: Header | None = None
    rows: Rows | None = None
    ready_rows: int = 0
    done: Done | None = None
    error: ServiceError | None = None
    work: asyncio.Task[None] | None = None
    refs: set[Ref] = field(default_factory=set)

    @property
    def pending(self) -> bool:
        """Whether it is still being encoded."""
        return self.done is None and self.error is None


@dataclass(eq=False)
class Ref:
    """One caller's hold on an item. Only the store changes it.

    Attributes:
        found: whether the item was there or under way already when the caller asked.
        found_done: whether it was done.
        error: why it holds nothing any more.
    """

    ref_id: str
    entry: Entry
    found: bool
    found_done: bool = False
    error: ServiceError | None = None
    readers: list[asyncio.Event] = field(default_factory=list)
    lease: asyncio.TimerHandle | None = None


class Store:
    """All items and refs of the process.

    Args:
        lease_seconds: a ref is dropped when nobody read through it for this long.
        cache_bytes: memory for items that no ref holds.
        shared_items: how many items processes on this host may read where they lie; each takes a descriptor.

    Attributes:
        pending_items: items that are still being encoded.
        held_bytes: memory of items that refs hold.
        cached_bytes: memory of items that no ref holds.
        encoded_items: items that were ever done.
        hits, misses: items asked for that were there or under way, and that were not.
        evictions: items that went to make room.
        empty: set while there are no refs.
    """

    def __init__(self, lease_seconds: float, cache_bytes: int = 0, *, shared_items: int = 0) -> None:
        self.lease_seconds, self._cache_bytes, self._places = lease_seconds, cache_bytes, shared_items
        self._refs: dict[str, Ref] = {}
        self._entries: dict[bytes, Entry] = {}  # but for failed ones
        self._cached: OrderedDict[bytes, Entry] = OrderedDict()  # those that no ref holds, the longest unused first
        self.pending_items = self.held_bytes = self.cached_bytes = 0
        self.encoded_items = self.hits = self.misses = self.evictions = 0
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def cached_items(self) -> int:
        """Items that no ref holds."""
        return len(self._cached)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def claim(self, key: bytes, media_bytes: int) -> Ref:
        """A new ref to the item of this key; ``found`` where it is there or under way, else it is new and pending."""
        entry = self._entries.get(key)
        found = entry is not None
        if entry is None:
            entry = self._entries[key] = Entry(key)
            self.misses += 1
            self.pending_items += 1
        else:
            self.hits += 1
            if self._cached.pop(key, None):
                self.cached_bytes -= entry.held_bytes
                self.held_bytes += entry.held_bytes
        metrics.cache_lookups.labels("hit" if found else "miss").inc()
        ref = Ref(uuid.uuid4().hex, entry, found, found_done=entry.done is not None)
        entry.refs.add(ref)
        self._refs[ref.ref_id] = ref
        self.empty.clear()
        if not found:
            self.hold(entry, media_bytes)
        self.start_lease(ref)
        self._measure()
        return ref

    def hold(self, entry: Entry, nbytes: int) -> None:
        """Say how much memory the item takes now."""
        assert entry.refs or not nbytes, "an item under way is held"
        self.held_bytes += nbytes - entry.held_bytes
        entry.held_bytes = nbytes
        self._measure()

    def open(self, entry: Entry, header: Header) -> None:
        """Rows will follow: there is room for all of them from here on."""
        assert entry.rows is None and entry.pending, "open comes once"
        entry.header, entry.rows = header, Rows(header.rows, header.features, shared=self._places > 0)
        self._places -= entry.rows.address is not None
        self.hold(entry, entry.held_bytes + entry.rows.nbytes)
        self._wake(entry)

    def append(self, entry: Entry, features: Features) -> None:
        """The next rows of every feature are ready; they are copied."""
        assert entry.rows is not None, "append comes after open"
        entry.rows.write(entry.ready_rows, features)
        self.advance(entry, len(features[0]))

    def advance(self, entry: Entry, count: int) -> None:
        """So many rows more have been written."""
        assert entry.header is not None and entry.pending, "rows come between open and finish"
        entry.ready_rows += count
        assert entry.ready_rows <= entry.header.rows, f"rows up to {entry.ready_rows} of {entry.header.rows}"
        self._wake(entry)

    def finish(self, entry: Entry, done: Done) -> None:
        """All rows are there, and the item holds nothing else."""
        assert entry.header is not None and entry.rows is not None and entry.ready_rows == entry.header.rows, "rows are missing"
        self.hold(entry, entry.rows.nbytes)
        entry.done = done
        self.pending_items -= 1
        self.encoded_items += 1
        self._wake(entry)

    def fail(self, entry: Entry, error: ServiceError) -> None:
        """There will be no more rows; what was held is freed, and whoever asks again starts anew."""
        error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames hold the media
        entry.error = error
        self._forget(entry)
        self._wake(entry)

    def drop(self, ref_ids: Sequence[str]) -> None:
        """Forget refs; unknown ids are ignored. An item under way that nobody holds any more is stopped and freed."""
        for ref_id in ref_ids:
            ref = self._refs.pop(ref_id, None)
            if ref is None:
                continue
            self.stop_lease(ref)
            ref.error = self.not_found(ref_id)
            for reader in ref.readers:
                reader.set()
            ref.entry.refs.remove(ref)
            if not ref.entry.refs:
                self._let_go(ref.entry)
        if not self._refs:
            self.empty.set()
        self._measure()

    def make_room(self, nbytes: int, limit: int) -> bool:
        """Evict items that no ref holds until so many bytes more stay below ``limit``; False where that is not enough."""
        while self._cached and self.held_bytes + self.cached_bytes + nbytes > limit:
            self._evict()
        self._measure()
        return self.held_bytes + self.cached_bytes + nbytes <= limit

    def clear(self) -> None:
        """Drop everything."""
        self.drop(list(self._refs))
        while self._cached:
            self._evict()

    def not_found(self, ref_id: str) -> ServiceError:
        """The error of a ref that is not held."""
        return ServiceError(
            grpc.StatusCode.NOT_FOUND,
            f"this ref is not held here: it was released, nobody fetched it for {self.lease_seconds:g} s, or another "
            "encoder issued it; encode the item again",
            reason="REF_NOT_FOUND",
            metadata={"ref_id": ref_id},
        )

    @contextmanager
    def reading(self, ref_ids: Sequence[str], wake: asyncio.Event) -> Iterator[Reading]:
        """Refs whose lease stands still; every change to one of them or its item sets ``wake``."""
        reading = Reading(self, [self._refs.get(ref_id) for ref_id in ref_ids], wake)
        reading.join()
        try:
            yield reading
        finally:
            reading.leave()

    def check_integrity(self) -> None:
        """Assert that totals are sums, that every unread ref has a lease, and that only what is done and unheld is cached."""
        entries = {ref.entry for ref in self._refs.values()}
        assert self.pending_items == sum(entry.pending for entry in self._entries.values())
        assert self.held_bytes == sum(entry.held_bytes for entry in entries)
        assert self.cached_bytes == sum(entry.held_bytes for entry in self._cached.values()) <= self._cache_bytes
        assert all(bool(ref.readers) != (ref.lease is not None) for ref in self._refs.values())
        assert all(ref in ref.entry.refs for ref in self._refs.values())
        assert all(entry.done and not entry.refs for entry in self._cached.values())
        assert set(self._entries.values()) == {entry for entry in entries if not entry.error} | set(self._cached.values())

    def _let_go(self, entry: Entry) -> None:
        """Nobody holds it any more."""
        if entry.done is None:
            if entry.work is not None:
                entry.work.cancel()
                entry.work = None  # the end of a cancelled task refers to its variables: the entry, and with it what is decoded
            self._forget(entry)
            return
        self.held_bytes -= entry.held_bytes
        self.cached_bytes += entry.held_bytes
        self._cached[entry.key] = entry
        while self.cached_bytes > self._cache_bytes:
            self._evict()

    def _evict(self) -> None:
        _, entry = self._cached.popitem(last=False)
        self.cached_bytes -= entry.held_bytes
        entry.held_bytes = 0
        self._forget(entry)
        self.evictions += 1
        metrics.cache_evictions.inc()

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self.pending_items -= entry.done is None
        if entry.rows is not None:
            self._places += entry.rows.address is not None
            entry.rows.close()
        entry.rows = None
        self.hold(entry, 0)

    def _wake(self, entry: Entry) -> None:
        for ref in entry.refs:
            for reader in ref.readers:
                reader.set()

    def start_lease(self, ref: Ref) -> None:
        """Nobody reads through it any more."""
        self.stop_lease(ref)
        ref.lease = asyncio.get_running_loop().call_later(self.lease_seconds, self.drop, [ref.ref_id])

    def stop_lease(self, ref: Ref) -> None:
        """Somebody reads through it."""
        if ref.lease is not None:
            ref.lease.cancel()
            ref.lease = None

    def _measure(self) -> None:
        metrics.refs.set(len(self._refs))
        metrics.held_bytes.set(self.held_bytes)
        metrics.cached_bytes.set(self.cached_bytes)


class Reading:
    """One reader of some refs.

    Attributes:
        refs: what it reads through; None where a ref was not there.
    """

    def __init__(self, store: Store, refs: list[Ref | None], wake: asyncio.Event) -> None:
        self.refs = refs
        self._store, self._wake = store, wake
        self._held: list[Ref] = []

    def join(self) -> None:
        """Let the leases stand still."""
        self._held = [ref for ref in self.refs if ref is not None and ref.error is None]
        for ref in self._held:
            self._store.stop_lease(ref)
            ref.readers.append(self._wake)

    def leave(self) -> None:
        """Let the leases run, where nobody else reads."""
        for ref in self._held:
            ref.readers.remove(self._wake)
            if not ref.readers and ref.error is None:
                self._store.start_lease(ref)
        self._held = []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While the reader is at an event; one that takes longer than a lease over it counts as gone for as long."""
        timer = asyncio.get_running_loop().call_later(self._store.lease_seconds, self.leave)
        try:
            yield
        finally:
            timer.cancel()
            if not self._held:
                self.join()
