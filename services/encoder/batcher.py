"""Groups preprocessed items of all requests into batches for the towers, oldest first, up to a budget of patches.

Knows nothing of refs or requests. A batch starts as soon as the towers are free; there is no waiting for more items.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.common import logs
from services.encoder import metrics
from services.encoder.features import Features
from services.encoder.preprocess import Prepared

logger = logging.getLogger(__name__)
Encode = Callable[[Sequence[Prepared]], list[Features]]


@dataclass(frozen=True, eq=False)
class _Waiting:
    item: Prepared
    result: asyncio.Future[Features]


class Batcher:
    """Runs ``encode`` in one thread of its own."""

    def __init__(self, encode: Encode, max_patches: int) -> None:
        self._encode = encode
        self._max_patches = max_patches
        self._waiting: deque[_Waiting] = deque()
        self._waiting_patches = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "towers")
        self._loop = asyncio.create_task(self._run(), name="batcher")

    async def room(self) -> None:
        """Wait until less than a full batch waits: nothing is prepared further ahead than that."""
        while self._waiting_patches >= self._max_patches:
            self._room.clear()
            await self._room.wait()

    async def encode(self, item: Prepared) -> Features:
        """The item's features; cancelling takes it out of the queue.

        Raises:
            Exception: what the towers raised for this item when it ran alone.
        """
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._count(item.patches)
        try:
            return await waiting.result
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._count(-item.patches)

    async def stop(self) -> None:
        """End the loop and the thread; a batch in the towers is finished first."""
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            await self._finish(self._take())

    def _take(self) -> list[_Waiting]:
        """The oldest items that fit the budget; one that exceeds it goes alone."""
        batch: list[_Waiting] = []
        patches = 0
        while self._waiting and (not batch or patches + self._waiting[0].item.patches <= self._max_patches):
            waiting = self._waiting.popleft()
            patches += waiting.item.patches
            batch.append(waiting)
        self._count(-patches)
        return batch

    async def _finish(self, batch: list[_Waiting]) -> None:
        """Give every item its features, or the error that it causes alone."""
        batch = [waiting for waiting in batch if not waiting.result.done()]
        if not batch:
            return
        metrics.batch_items.observe(len(batch))
        try:
            loop = asyncio.get_running_loop()
            features = await loop.run_in_executor(self._thread, self._encode, [waiting.item for waiting in batch])
            assert len(features) == len(batch), f"{len(features)} results for {len(batch)} items"
        except Exception as error:
            if len(batch) > 1:
                cause = type(error).__name__
                logs.event(logger, "batch failed, its items run alone", logging.WARNING, items=len(batch), error=cause)
                for waiting in batch:
                    await self._finish([waiting])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for waiting, item_features in zip(batch, features, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(item_features)

    def _count(self, patches: int) -> None:
        self._waiting_patches += patches
        self._changed.set()
        self._room.set()
