"""Batching, with towers made up here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from services.encoder.batcher import Batcher
from services.encoder.features import Features
from services.encoder.preprocess import Prepared
from services.models.media import Grid, Modality

pytestmark = pytest.mark.asyncio


def item(patches: int, value: float = 0.0) -> Prepared:
    return Prepared(Modality.IMAGE, {"value": torch.tensor([value])}, Grid(1, 1, patches), patches)


class FakeTowers:
    """Doubles every value, once the gate is open; refuses negative ones."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, batch: Sequence[Prepared]) -> list[Features]:
        self.batches.append([i.patches for i in batch])
        assert self.gate.wait(10)
        values = [i.inputs["value"].item() for i in batch]
        if min(values) < 0:
            raise ValueError("negative")
        return [[torch.tensor([[2 * value]])] for value in values]


@asynccontextmanager
async def batching(max_patches: int) -> AsyncIterator[tuple[Batcher, FakeTowers]]:
    towers = FakeTowers()
    batcher = Batcher(towers.encode, max_patches)
    try:
        yield batcher, towers
    finally:
        towers.gate.set()
        await batcher.stop()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_items_that_wait_go_together_up_to_the_budget() -> None:
    async with batching(10) as (batcher, towers):
        towers.gate.clear()
        tasks = [asyncio.create_task(batcher.encode(item(p, i))) for i, p in enumerate([1, 4, 4, 3, 30, 10, 1])]
        await until(lambda: bool(towers.batches))
        towers.gate.set()
        results = await asyncio.gather(*tasks)
        assert towers.batches[0][0] == 1
        assert all(len(batch) == 1 or sum(batch) <= 10 for batch in towers.batches)
        assert [patches for batch in towers.batches for patches in batch] == [1, 4, 4, 3, 30, 10, 1]
        assert len(towers.batches) < 7
        assert [features[0].item() for features in results] == [2 * i for i in range(7)]


async def test_a_bad_item_fails_alone() -> None:
    async with batching(100) as (batcher, towers):
        towers.gate.clear()
        first = asyncio.create_task(batcher.encode(item(1)))
        await until(lambda: bool(towers.batches))
        tasks = [asyncio.create_task(batcher.encode(item(1, value))) for value in (1, -1, 3)]
        await settled()
        towers.gate.set()
        await first
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert (results[0][0].item(), str(results[1]), results[2][0].item()) == (2, "negative", 6)
        assert towers.batches == [[1], [1, 1, 1], [1], [1], [1]]


async def test_a_cancelled_item_never_reaches_the_towers() -> None:
    async with batching(100) as (batcher, towers):
        towers.gate.clear()
        first = asyncio.create_task(batcher.encode(item(1)))
        await until(lambda: bool(towers.batches))
        second, third = (asyncio.create_task(batcher.encode(item(patches))) for patches in (2, 3))
        await settled()
        second.cancel()
        await settled()
        towers.gate.set()
        await asyncio.gather(first, third)
        assert towers.batches == [[1], [3]]
        assert second.cancelled()


async def test_cancelling_an_item_in_the_towers_leaves_its_batch_alone() -> None:
    async with batching(100) as (batcher, towers):
        towers.gate.clear()
        tasks = [asyncio.create_task(batcher.encode(item(1, value))) for value in (1, 2)]
        await until(lambda: bool(towers.batches))
        tasks[0].cancel()
        await settled()
        towers.gate.set()
        assert (await tasks[1])[0].item() == 4


async def test_room_is_held_back_while_a_full_batch_waits() -> None:
    async with batching(10) as (batcher, towers):
        await batcher.room()
        towers.gate.clear()
        tasks = [asyncio.create_task(batcher.encode(item(patches))) for patches in (10, 6, 6)]
        await until(lambda: bool(towers.batches))
        room = asyncio.create_task(batcher.room())
        await settled()
        assert batcher._waiting_patches >= 10 and not room.done()
        towers.gate.set()
        await asyncio.gather(*tasks, room)
        assert batcher._waiting_patches == 0
