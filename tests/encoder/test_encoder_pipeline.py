"""The order in which an item is decoded, prepared, encoded and read, with decoder, processor and towers made up here."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import REGISTRY

from services.common.errors import ServiceError
from services.encoder.batcher import Batcher
from services.encoder.features import Features
from services.encoder.fleet_cache import Stored
from services.encoder.pipeline import Pipeline, Planned
from services.encoder.preprocess import Prepared
from services.encoder.reader import Chunk, Event, read
from services.encoder.rows import Rows
from services.encoder.store import Done, Header, Store
from services.models.media import Grid, ItemPlan, Modality
from tests.patience import PATIENCE

HIDDEN = 4
pytestmark = pytest.mark.asyncio


@dataclass
class Bench:
    """A pipeline whose items are ``name`` in bytes; each piece is one patch and becomes as many rows as it has patches.

    Attributes:
        log: what happened, in order: (event, name).
        shut: names of items that the towers hold, piece by piece, until ``gate`` lets them through.
        broken, longer: items one of whose pieces, by number, breaks the towers or has a row too many.
        grid: what preparing finds, where it is not what was planned.
    """

    log: list[tuple[str, str]] = field(default_factory=list)
    shut: set[str] = field(default_factory=set)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    broken: dict[str, int] = field(default_factory=dict)
    longer: dict[str, int] = field(default_factory=dict)
    grid: Grid | None = None

    def __post_init__(self) -> None:
        self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
        self.store = Store(30)
        self.pipeline = Pipeline(self.store, Batcher(self.encode, 8), self.decode, self.preprocess, self.split, 1)

    def submit(self, name: str, rows: int) -> str:
        planned = Planned(ItemPlan(Modality.IMAGE, rows, Grid(rows, 1, 1), rows, tiles=rows), "data")
        return self.pipeline.submit(uuid.uuid4().bytes, planned, name.encode())

    def note(self, event: str, name: str) -> None:
        self.log.append((event, name))
        self.loop.call_soon_threadsafe(self.changed.set)

    async def until(self, *entry: str) -> None:
        while entry not in self.log:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)

    async def decode(self, planned: Planned, data: bytes) -> Any:
        self.note("decode", data.decode())
        return data.decode()

    def preprocess(self, planned: Planned, decoded: Any) -> Prepared:
        self.note("preprocess", decoded)
        patches = planned.plan.patches
        inputs = {"name": torch.tensor([list(decoded.encode())] * patches), "number": torch.arange(patches)}
        self.note("prepared", decoded)
        return Prepared(Modality.IMAGE, inputs, self.grid or planned.plan.grid, patches)

    def split(self, item: Prepared) -> list[Prepared]:
        return [
            replace(item, inputs={name: tensor[i : i + 1] for name, tensor in item.inputs.items()}, patches=1)
            for i in range(item.patches)
        ]

    def encode(self, batch: Sequence[Prepared]) -> list[Features]:
        features: list[Features] = []
        for piece in batch:
            name, number = bytes(piece.inputs["name"][0].tolist()).decode(), int(piece.inputs["number"])
            self.note(f"towers {number}", name)
            assert name not in self.shut or self.gate.acquire(timeout=PATIENCE)
            if self.broken.get(name) == number:
                raise RuntimeError("secret")
            rows = 1 + (self.longer.get(name) == number)
            features.append([torch.full((rows, HIDDEN), float(number)), torch.full((rows, 2), float(-number))])
            self.note(f"through {number}", name)
        return features

    async def events(self, ref: str, start: int = 0) -> list[Event]:
        async with aclosing(read(self.store, [(ref, start)], 1)) as events:
            return [event async for _, event in events]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    try:
        yield made
        made.store.check_integrity()
    finally:
        made.shut.clear()
        made.gate.release(1000)
        await made.pipeline.stop()


def numbers(events: Sequence[Event], feature: int = 0) -> list[int]:
    return [int(abs(e.rows[0, 0])) for e in events if isinstance(e, Chunk) and e.feature == feature]


async def test_the_next_item_is_prepared_while_the_towers_are_busy() -> None:
    async with bench() as made:
        made.shut.add("a")
        refs = [made.submit("a", 1)]
        await made.until("towers 0", "a")
        refs.append(made.submit("b", 1))
        await made.until("prepared", "b")
        assert ("through 0", "a") not in made.log
        made.gate.release()
        for ref in refs:
            assert isinstance((await made.events(ref))[-1], Done)
        order = [made.log.index(entry) for entry in [("towers 0", "a"), ("decode", "b"), ("prepared", "b"), ("through 0", "a")]]
        assert order == sorted(order)


async def test_nothing_is_prepared_further_ahead_than_a_batch_and_a_small_item_passes_a_large_one() -> None:
    """The budget is 8. A second item of 20 waits until less than 8 of the first are left; one of 2 goes beside it."""
    async with bench() as made:
        made.shut.add("large")
        large, second, small = made.submit("large", 20), made.submit("second", 20), made.submit("small", 2)
        while len(made.pipeline._batcher._line) < 2:
            await asyncio.sleep(0)
        assert ("through 0", "large") not in made.log
        made.gate.release(3)
        assert numbers(await made.events(small)) == [0, 1]
        assert ("decode", "second") not in made.log
        made.gate.release(9)
        await made.until("towers 12", "large")
        await made.until("decode", "second")
        made.gate.release(100)
        for ref in (large, second):
            assert numbers(await made.events(ref)) == list(range(20))


async def test_two_readers_at_different_rows_of_an_item_that_is_being_encoded() -> None:
    async with bench() as made:
        made.shut.add("a")
        ref = made.submit("a", 6)
        made.gate.release(2)
        await made.until("towers 2", "a")
        found: dict[int, list[Event]] = {0: [], 4: []}
        arrived = asyncio.Event()

        async def reader(start: int) -> None:
            async with aclosing(read(made.store, [(ref, start)], 1)) as events:
                async for _, event in events:
                    found[start].append(event)
                    arrived.set()

        readers = [asyncio.create_task(reader(start)) for start in found]
        while numbers(found[0], 1) != [0, 1]:
            arrived.clear()
            await asyncio.wait_for(arrived.wait(), PATIENCE)
        header = Header(6, Grid(6, 1, 1), ((HIDDEN, torch.float32), (2, torch.float32)))
        assert found[0][0] == found[4][0] == header and len(found[4]) == 1
        assert ("through 2", "a") not in made.log
        made.gate.release(100)
        await asyncio.gather(*readers)
        for start, events in found.items():
            assert numbers(events) == numbers(events, 1) == list(range(start, 6)) and isinstance(events[-1], Done)


async def test_inputs_are_held_until_the_last_piece_is_through() -> None:
    async with bench() as made:
        made.shut.add("a")
        ref = made.submit("a", 3)
        await made.until("towers 0", "a")
        inputs = made.store.held_bytes
        assert inputs == 3 * (8 + 8)
        made.gate.release()
        await made.until("towers 1", "a")
        reader = asyncio.create_task(made.events(ref))
        while made.store.held_bytes == inputs:
            await asyncio.sleep(0)
        assert made.store.held_bytes == inputs + 2 * 64  # a feature takes a multiple of 64 bytes
        made.gate.release(2)
        await reader
        assert made.store.held_bytes == 2 * 64


async def test_a_failing_piece_fails_its_item_and_what_was_sent_stays_sent() -> None:
    async with bench() as made:
        made.broken["a"] = 2
        made.shut.add("a")
        ref, other = made.submit("a", 5), made.submit("b", 3)
        reader = asyncio.create_task(made.events(ref))
        made.gate.release(2)
        await made.until("towers 2", "a")
        while made.store._refs[ref].entry.ready_rows < 2:
            await asyncio.sleep(0)
        made.gate.release(100)
        events = await reader
        assert numbers(events)[:1] == [0] and isinstance(events[0], Header)
        assert isinstance(events[-1], ServiceError) and "secret" not in events[-1].message
        assert numbers(await made.events(other)) == [0, 1, 2]
        assert not [entry for entry in made.log if entry[0] in ("towers 3", "towers 4") and entry[1] == "a"]


async def test_dropping_an_item_takes_its_other_pieces_out() -> None:
    async with bench() as made:
        made.shut.add("a")
        ref = made.submit("a", 5)
        made.gate.release()
        await made.until("towers 1", "a")
        made.store.drop([ref])
        other = made.submit("b", 1)
        made.gate.release(100)
        assert numbers(await made.events(other)) == [0]
        assert ("towers 2", "a") not in made.log and made.store.held_bytes == 2 * 64


@pytest.mark.parametrize(
    ("piece", "seen", "actual"), [(0, [], "2"), (1, [0], "3")], ids=["before the header", "behind rows that were sent"]
)
async def test_rows_that_were_not_planned_fail_the_item(piece: int, seen: list[int], actual: str) -> None:
    async with bench() as made:
        before = REGISTRY.get_sample_value("estimate_mismatch_total") or 0.0
        made.longer["a"] = piece
        made.shut.add("a")
        ref = made.submit("a", 1 + piece)
        reader = asyncio.create_task(made.events(ref))
        for number in range(1 + piece):
            await made.until(f"towers {number}", "a")
            while made.store._refs[ref].entry.ready_rows < number:
                await asyncio.sleep(0)
            made.gate.release()
        *events, error = await reader
        assert numbers(events) == seen
        assert isinstance(error, ServiceError) and (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "ESTIMATE_MISMATCH")
        assert error.metadata == {"planned": str(1 + piece), "actual": actual}
        assert REGISTRY.get_sample_value("estimate_mismatch_total") == before + 1


async def test_a_grid_that_was_not_planned_is_seen_before_the_towers() -> None:
    async with bench() as made:
        made.grid = Grid(1, 1, 1)
        (error,) = await made.events(made.submit("a", 3))
        assert isinstance(error, ServiceError) and error.reason == "ESTIMATE_MISMATCH"
        assert not [event for event, _ in made.log if event.startswith("towers")]


class Media(bytes):
    """A file that says when it is gone."""

    gone = False

    def __del__(self) -> None:
        Media.gone = True


async def test_media_are_let_go_of_as_soon_as_they_are_decoded() -> None:
    async with bench() as made:
        made.shut.add("a")
        planned = Planned(ItemPlan(Modality.IMAGE, 1, Grid(1, 1, 1), 1, tiles=1), "data")
        made.pipeline.submit(b"key", planned, Media(b"a"))
        await made.until("towers 0", "a")
        assert Media.gone


class Fleet:
    """A fleet's cache with one entry, or a mistake in it."""

    def __init__(self, found: Stored | None) -> None:
        self._found = found

    async def get(self, key: bytes) -> Stored:
        if self._found is None:
            raise RuntimeError("secret")
        return self._found

    async def close(self) -> None:
        pass


async def test_a_mistake_in_the_fleet_s_cache_ends_its_item() -> None:
    async with bench() as made:
        made.pipeline._fleet = Fleet(None)  # type: ignore[assignment]
        (error,) = await asyncio.wait_for(made.events(made.submit("a", 1)), PATIENCE)
        assert isinstance(error, ServiceError) and error.code is grpc.StatusCode.INTERNAL and "secret" not in error.message


async def test_large_rows_of_the_fleet_are_copied_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    copied_by = []
    write = Rows.write
    monkeypatch.setattr(Rows, "write", lambda *a: (copied_by.append(threading.current_thread()), write(*a))[1])
    rows = torch.zeros(2**20, 4)
    async with bench() as made:
        header = Header(len(rows), Grid(len(rows), 1, 1), ((4, torch.float32),))
        made.pipeline._fleet = Fleet(Stored(header, [rows]))  # type: ignore[assignment]
        ref = made.submit("a", len(rows))
        async with aclosing(read(made.store, [(ref, len(rows))], 1)) as events:
            assert isinstance([event async for _, event in events][-1], Done)
        assert copied_by and threading.main_thread() not in copied_by and not made.log
