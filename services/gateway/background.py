"""Work beside a request: several things at a time, and what outlives it, such as giving resources back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def side_by_side(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. Raises the first failure in that order; nothing runs when this is over."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Background:
    """Tasks that nobody awaits; a failure is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` on its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def finish(self, timeout: float) -> None:
        """Wait for what runs, then cancel what still runs."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        for task in self._tasks:
            task.cancel()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("background task failed", exc_info=error)
