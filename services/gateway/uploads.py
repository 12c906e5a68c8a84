"""The media of one request at one encoder: handed over side by side, given back together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.backends import Encoder
from services.gateway.prompt import Item
from triptych.common.v1 import media_pb2

RELEASE_SECONDS = 5.0


class Uploads:
    """Starts handing over at once. The owner must :meth:`drop` it, whatever happens."""

    def __init__(self, encoder: Encoder, items: Sequence[Item], request_id: str, timeout: float) -> None:
        self._encoder = encoder
        encoder.active += 1
        encoder.served += 1
        self._tasks = [asyncio.create_task(encoder.encode(item, request_id, timeout)) for item in items]

    async def refs(self) -> list[media_pb2.EmbeddingRef]:
        """One ref for each item, in order; raises the first failure."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        ids = [task.result() for task in self._tasks if task.done()]
        return [media_pb2.EmbeddingRef(id=ref, encoder_address=self._encoder.address) for ref in ids]

    async def drop(self) -> None:
        """Release every ref. Calls under way are waited for: one that is cancelled could leave a ref that nobody knows."""
        try:
            done, late = await asyncio.wait(self._tasks, timeout=RELEASE_SECONDS)
            for task in late:
                task.cancel()
            if ids := [task.result() for task in done if task.exception() is None]:
                await self._encoder.release(ids, RELEASE_SECONDS)
        finally:
            self._encoder.active -= 1
