"""Batching, with towers made up here."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
import torch

from services.encoder.batcher import Batcher
from services.encoder.features import Features
from services.encoder.preprocess import Prepared
from services.models.media import Grid, Modality
from tests.patience import PATIENCE

pytestmark = pytest.mark.asyncio


def piece(patches: int, value: float = 0.0) -> Prepared:
    return Prepared(Modality.IMAGE, {"value": torch.tensor([value])}, Grid(1, 1, patches), patches)


def pieces(count: int, patches: int, name: float) -> list[Prepared]:
    """Of one item; the values are name, name + 0.01 and so on."""
    return [piece(patches, name + i / 100) for i in range(count)]


class FakeTowers:
    """Doubles every value; refuses negative ones. With the gate shut, a batch waits until it is let through."""

    def __init__(self) -> None:
        self.batches: list[list[Prepared]] = []
        self.gate = threading.Semaphore(0)
        self.shut = False
        self._started = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def encode(self, batch: Sequence[Prepared]) -> list[Features]:
        self.batches.append(list(batch))
        self._loop.call_soon_threadsafe(self._started.set)
        assert not self.shut or self.gate.acquire(timeout=PATIENCE)
        values = [i.inputs["value"].item() for i in batch]
        if min(values) < 0:
            raise ValueError("negative")
        return [[torch.tensor([[2 * value]])] for value in values]

    @property
    def patches(self) -> list[list[int]]:
        return [[p.patches for p in batch] for batch in self.batches]

    @property
    def names(self) -> list[list[int]]:
        """The items of every batch."""
        return [[int(p.inputs["value"].item() + 0.001) for p in batch] for batch in self.batches]

    async def batch(self, number: int) -> None:
        """Until that batch is in the towers; the first is 1."""
        while len(self.batches) < number:
            self._started.clear()
            await self._started.wait()

    async def let_through(self) -> None:
        """The batch in the towers, until the next is there."""
        number = len(self.batches)
        self.gate.release()
        await self.batch(number + 1)

    def open(self) -> None:
        self.shut = False
        self.gate.release()


@asynccontextmanager
async def batching(max_patches: int) -> AsyncIterator[tuple[Batcher, FakeTowers]]:
    towers = FakeTowers()
    batcher = Batcher(towers.encode, max_patches)
    try:
        yield batcher, towers
        assert not batcher._turns and not batcher._line
    finally:
        towers.open()
        await batcher.stop()


async def encoded(batcher: Batcher, item: Sequence[Prepared]) -> list[float]:
    """An item's way; what came of its pieces."""
    with batcher.turn(sum(p.patches for p in item)) as turn:
        async with aclosing(batcher.encode(turn, item)) as parts:
            return [round(features[0].item() / 2, 2) async for features in parts]


def start(batcher: Batcher, *item: Prepared) -> asyncio.Task[list[float]]:
    return asyncio.create_task(encoded(batcher, item))


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_items_that_wait_go_together_up_to_the_budget() -> None:
    async with batching(10) as (batcher, towers):
        towers.shut = True
        tasks = [start(batcher, piece(p, i)) for i, p in enumerate([1, 4, 4, 3, 30, 10, 1])]
        await towers.batch(1)
        towers.open()
        results = await asyncio.gather(*tasks)
        assert towers.patches[0][0] == 1
        assert all(len(batch) == 1 or sum(batch) <= 10 for batch in towers.patches)
        assert [patches for batch in towers.patches for patches in batch] == [1, 4, 4, 3, 30, 10, 1]
        assert len(towers.batches) < 7
        assert results == [[i] for i in range(7)]


async def test_a_small_item_goes_in_the_very_next_batch_beside_a_large_one() -> None:
    """Also where the large one came first, has more pieces than a batch holds, and never steps back for the small."""
    async with batching(100) as (batcher, towers):
        towers.shut = True
        large = start(batcher, *pieces(64, 30, name=1))
        await towers.batch(1)
        for number in range(2, 12):
            small = start(batcher, piece(5, number))
            await settled()
            await towers.let_through()
            assert sorted(towers.names[-1]) == [1, number], "the batch after the one that ran when it came"
            await towers.let_through()
            await small
        towers.open()
        assert await large == [round(1 + i / 100, 2) for i in range(64)]
        assert len(towers.batches) == 64


async def test_large_items_share_the_budget_and_a_small_one_waits_for_a_piece_of_each() -> None:
    """Four pieces fill a batch: behind eight large items that is two batches, and the third has the small one."""
    async with batching(120) as (batcher, towers):
        towers.shut = True
        large = [start(batcher, *pieces(64, 30, name)) for name in range(1, 9)]
        await towers.batch(1)
        await settled()
        small = start(batcher, piece(5, 9))
        await settled()
        came = len(towers.batches)
        while 9 not in towers.names[-1]:
            await towers.let_through()
        assert len(towers.batches) - came <= 3
        for _ in range(8):
            await towers.let_through()
        served = [name for batch in towers.names[came:] for name in batch]
        assert all(1 <= served.count(name) <= 6 for name in range(1, 9)), "nobody starves and nobody is preferred"
        towers.open()
        assert await small == [9] and all(len(rows) == 64 for rows in await asyncio.gather(*large))


async def test_a_crowd_of_small_items_does_not_starve_a_large_one() -> None:
    """Four that come with every batch need most of it, and a piece of the large one needs most of it: it gets every second."""
    async with batching(100) as (batcher, towers):
        towers.shut = True
        large = start(batcher, *pieces(20, 60, name=1))
        crowd = []
        await towers.batch(1)
        for _ in range(12):
            crowd += [start(batcher, piece(15, 2)) for _ in range(4)]
            await settled()
            await towers.let_through()
        having = [number for number, names in enumerate(towers.names) if 1 in names]
        assert len(having) >= 6 and all(later - earlier <= 2 for earlier, later in itertools.pairwise(having))
        towers.open()
        assert len(await large) == 20
        await asyncio.gather(*crowd)


async def test_pieces_come_in_order_each_as_soon_as_it_is_through() -> None:
    async with batching(10) as (batcher, towers):
        towers.shut = True
        with batcher.turn(12) as turn:
            async with aclosing(batcher.encode(turn, pieces(3, 4, name=1))) as parts:
                for number in range(1, 4):
                    following = asyncio.ensure_future(anext(parts))
                    await towers.batch(number)
                    assert not following.done() and turn.left == 12 - 4 * number
                    towers.gate.release()
                    assert round((await following)[0].item(), 2) == round(2 + 0.02 * (number - 1), 2)


async def test_a_bad_piece_fails_its_item_alone_and_ends_it() -> None:
    async with batching(100) as (batcher, towers):
        towers.shut = True
        first = start(batcher, piece(1))
        await towers.batch(1)
        good = start(batcher, piece(2, 1), piece(2, 1.5))
        bad = start(batcher, piece(3, -1), piece(4, 2), piece(4, 3))
        last = start(batcher, piece(5, 3))
        await settled()
        towers.open()
        towers.gate.release(10)
        results = await asyncio.gather(first, good, bad, last, return_exceptions=True)
        assert (results[1], str(results[2]), results[3]) == ([1, 1.5], "negative", [3])
        assert towers.patches == [[1], [2, 3, 5], [2], [3], [5], [2]]


async def test_a_cancelled_item_never_reaches_the_towers() -> None:
    async with batching(100) as (batcher, towers):
        towers.shut = True
        first = start(batcher, piece(1))
        await towers.batch(1)
        second, third = (start(batcher, piece(patches)) for patches in (2, 3))
        await settled()
        second.cancel()
        await settled()
        towers.open()
        await asyncio.gather(first, third)
        assert towers.patches == [[1], [3]]
        assert second.cancelled()


async def test_cancelling_takes_the_rest_of_an_item_out_and_leaves_its_batch_alone() -> None:
    async with batching(100) as (batcher, towers):
        towers.shut = True
        first = start(batcher, piece(9))
        await towers.batch(1)
        large, small = start(batcher, *pieces(5, 4, name=1)), start(batcher, piece(1, 2), piece(1, 2.5))
        await settled()
        await towers.let_through()
        large.cancel()
        await settled()
        towers.open()
        assert await small == [2, 2.5]
        await first
        assert towers.patches == [[9], [4, 1], [1]]


async def test_room_is_held_back_while_a_full_batch_is_in_front() -> None:
    async with batching(10) as (batcher, towers):
        towers.shut = True
        tasks = [start(batcher, piece(patches)) for patches in (10, 6, 6)]
        await towers.batch(1)
        await settled()
        with batcher.turn(6) as turn:
            room = asyncio.create_task(batcher.room(turn))
            await settled()
            assert not room.done()
            towers.open()
            towers.gate.release(10)
            await asyncio.gather(*tasks, room)


async def test_a_small_item_has_room_behind_a_large_one_and_a_large_one_has_not() -> None:
    """Later ones never count: the large one gets its turn however many small ones come."""
    async with batching(10) as (batcher, towers):
        towers.shut = True
        large = start(batcher, *pieces(64, 4, name=1))
        await towers.batch(1)
        with batcher.turn(4 * 64) as second, batcher.turn(3) as small, batcher.turn(3) as other, batcher.turn(3) as last:
            await asyncio.wait_for(batcher.room(small), PATIENCE)
            await asyncio.wait_for(batcher.room(other), PATIENCE)
            waiting = [asyncio.create_task(batcher.room(turn)) for turn in (second, last)]
            await settled()
            assert not any(room.done() for room in waiting), "a batch in front: 63 x 4; or 3 each of large, second, small, other"
            towers.open()
            towers.gate.release(100)
            await asyncio.wait_for(waiting[0], PATIENCE)
            assert await large == [round(1 + i / 100, 2) for i in range(64)]
        await asyncio.gather(waiting[1])


async def test_what_is_prepared_ahead_is_bounded_whatever_the_sizes() -> None:
    """With everything admitted that may be, the sum is the largest item and a little more than some batches."""
    async with batching(100) as (batcher, towers):
        towers.shut = True
        sizes = [1000, 5, 300, 5, 40, 700, 20, 5, 90, 5, 60, 60, 5, 33, 500] * 20
        admitted: list[int] = []

        async def arrive(size: int) -> None:
            with batcher.turn(size) as turn:
                await batcher.room(turn)
                admitted.append(size)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(arrive(size)) for size in sizes]
        await settled()
        assert sum(admitted) <= max(sizes) + 4 * 100 and len(admitted) >= 10
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
