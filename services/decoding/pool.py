"""The workers that decode: as many files at a time, the others wait. A worker that dies is replaced at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import grpc

from services.common import logs
from services.common.errors import ServiceError, invalid, unavailable
from services.decoding import metrics
from services.decoding.process import Limits, Worker, WorkerFailed, WorkerLost
from services.decoding.refusals import TEXTS, Refused
from services.decoding.specs import Decoded, Spec

logger = logging.getLogger(__name__)
_RETRY_SECONDS = (0.1, 5.0)  # between attempts to start a worker, first and longest


class DecodePool:
    """Decodes files of clients in processes of their own. All methods are called from one event loop.

    Args:
        workers: how many.
        limits: what one file may cost.
        max_waiting: files that may wait for a worker; more are refused.

    Attributes:
        restarts: workers that were replaced so far.
    """

    def __init__(self, workers: int, limits: Limits, max_waiting: int) -> None:
        self._count, self._limits, self._max_waiting = workers, limits, max_waiting
        self._workers: set[Worker] = set()
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()  # may hold dead ones
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._stopped = False
        self.restarts = 0

    @property
    def alive(self) -> int:
        """Workers that can decode."""
        return sum(worker.alive for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start the workers.

        Raises:
            WorkerLost, OSError: one does not start.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._start_one())
        except* (WorkerLost, OSError) as lost:
            await self.stop()
            raise lost.exceptions[0] from None
        sandboxed = all(worker.sandboxed for worker in self._workers)
        logs.event(logger, "decode workers started", workers=self._count, sandboxed=sandboxed)

    async def stop(self) -> None:
        """End all workers; files that they are at fail."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        metrics.workers.set(0)

    async def decode(self, data: bytes, spec: Spec, field: str) -> Decoded:
        """Decode a file. Who stops waiting does not stop the worker: it finishes, within its limits, for nobody.

        Args:
            data: the file.
            spec: what is wanted of it.
            field: the part's path in the client's request, for errors.

        Raises:
            ServiceError: INVALID_ARGUMENT, the file is not decoded; INTERNAL, it should have been; RESOURCE_EXHAUSTED or
                UNAVAILABLE, try again.
        """
        if self._stopped:
            raise unavailable("the service is going down; try again")
        if self._waiting >= self._max_waiting:
            text = f"{self._waiting} files wait to be decoded, which is the limit; try again later"
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, text, reason="DECODERS_BUSY", metadata={"limit": self._max_waiting}, retry_delay=1.0)
        return await asyncio.shield(self._task(self._decode(await self._take(), data, spec, field)))

    async def _decode(self, worker: Worker, data: bytes, spec: Spec, field: str) -> Decoded:
        """Twice where the worker dies: it may have died of what it decoded earlier, or been killed for its memory."""
        try:
            try:
                return await self._ask(worker, data, spec)
            except WorkerLost as lost:
                if lost.timed_out:
                    raise Refused("DECODE_TIMEOUT") from None
            try:
                return await self._ask(await self._take(), data, spec)
            except WorkerLost as lost:
                raise Refused("DECODE_TIMEOUT" if lost.timed_out else "DECODE_CRASHED") from None
        except Refused as refused:
            raise self._error(refused, spec, field) from None
        except WorkerFailed as failed:
            logs.event(logger, "decoder failed", logging.ERROR, kind=spec.word, worker_traceback=str(failed))
            text = f"internal error; the service's log has the details under request id {logs.request_id.get()}"
            raise ServiceError(grpc.StatusCode.INTERNAL, text, field=field) from None

    async def _ask(self, worker: Worker, data: bytes, spec: Spec) -> Decoded:
        try:
            decoded = await worker.decode(data, spec)
        except (Refused, WorkerFailed) as error:
            if isinstance(error, Refused) and error.code == "DECODE_MEMORY":
                self._replace(worker, "out of memory")  # what it allocated may lie about in pieces
            else:
                self._give_back(worker)
            raise
        except WorkerLost as lost:
            self._replace(worker, str(lost))
            raise
        except asyncio.CancelledError:  # stop() ends it at its work
            worker.alive = False
            raise
        except Exception as error:  # no descriptor or memory left for the result
            self._replace(worker, repr(error))
            raise
        self._give_back(worker)
        return decoded

    def _error(self, refused: Refused, spec: Spec, field: str) -> ServiceError:
        figures: dict[str, int] = dict(refused.figures)
        if refused.code == "DECODE_MEMORY":
            figures = {"limit": self._limits.memory_bytes}
        try:
            text = TEXTS[refused.code].format(word=spec.word, **figures)
        except (KeyError, IndexError):  # a worker that is no longer ours leaves figures out
            text = f"the {spec.word} cannot be decoded"
        metrics.refusals.labels(refused.code).inc()
        shown = {name: figures[name] for name in ("limit", "requested") if name in figures}
        return invalid(field, text, reason=refused.code, **shown)

    async def _take(self) -> Worker:
        self._waiting += 1
        try:
            while True:
                worker = await self._idle.get()
                if worker.alive:
                    worker.unwatch()
                    return worker
        finally:
            self._waiting -= 1

    def _give_back(self, worker: Worker) -> None:
        worker.watch(lambda: self._replace(worker, "ended while idle"))
        self._idle.put_nowait(worker)

    def _replace(self, worker: Worker, why: str) -> None:
        worker.alive = False
        worker.unwatch()
        self._workers.discard(worker)
        metrics.workers.set(self.alive)
        if self._stopped:
            self._workers.add(worker)  # stop() ends it
            return
        self.restarts += 1
        metrics.restarts.inc()
        logs.event(logger, "decode worker replaced", logging.WARNING, why=why, worker_pid=worker.pid)
        self._task(self._start_again())
        closing = asyncio.create_task(worker.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _start_again(self) -> None:
        wait, longest = _RETRY_SECONDS
        while True:
            try:
                return await self._start_one()
            except (WorkerLost, OSError) as error:
                logs.event(logger, "decode worker does not start", logging.ERROR, why=str(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, longest)

    async def _start_one(self) -> None:
        worker = Worker(self._limits)
        try:
            await worker.ready()
        except BaseException:
            await asyncio.shield(worker.close())
            raise
        self._workers.add(worker)
        metrics.workers.set(self.alive)
        self._give_back(worker)

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it
