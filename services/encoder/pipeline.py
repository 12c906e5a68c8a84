"""The way of one item: decode in a worker process, preprocess in a thread, towers in a batch, rows into the store.

An item that fails does so alone, with an error that a client may see. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import grpc

from services.common import logs
from services.common.errors import ServiceError
from services.decoding.specs import Decoded
from services.encoder import metrics
from services.encoder.batcher import Batcher
from services.encoder.features import Features
from services.encoder.fleet_cache import FleetCache, Stored
from services.encoder.preprocess import Prepared
from services.encoder.store import Done, Entry, Header, Store
from services.models.media import Grid, ItemPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """What the gateway expects of an item.

    Attributes:
        plan: rows that it reserved, and what decoding and the towers need to know; its ``runs`` are the prompt's affair.
        field: the part's path in the client's request, for errors.
        check_grid: whether the gateway said how the rows are arranged.
    """

    plan: ItemPlan
    field: str
    check_grid: bool = True


Decode = Callable[[Planned, bytes], Awaitable[Decoded]]
Preprocess = Callable[[Planned, Decoded], Prepared]


class Pipeline:
    """Turns submitted items into rows in ``store``.

    Args:
        store: where the rows go.
        batcher: runs the towers.
        decode: the file's pixels or samples.
        preprocess: makes the towers' inputs of them; called in threads.
        at_once: items decoded and preprocessed at the same time.
        fleet: rows that other encoders made, if they share them.
    """

    def __init__(
        self,
        store: Store,
        batcher: Batcher,
        decode: Decode,
        preprocess: Preprocess,
        at_once: int,
        fleet: FleetCache | None = None,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._batcher = batcher
        self._decode = decode
        self._preprocess = preprocess
        self._places = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, "preprocess")

    def submit(self, key: bytes, planned: Planned, data: bytes) -> str:
        """A ref to the item that ``key`` names; work on it starts where it is not there or under way.

        The media is let go of as soon as it is decoded.
        """
        ref = self._store.claim(key, len(data))
        if not ref.found:
            ref.entry.work = asyncio.create_task(self._fill(ref.entry, planned, data), name=f"encode {ref.ref_id}")
        return ref.ref_id

    async def _fill(self, entry: Entry, planned: Planned, data: bytes) -> None:
        """Rows from the fleet's cache where they are there, else from the towers."""
        stored = await self._fleet.get(entry.key) if self._fleet else None
        if stored is not None and (stored.header.rows, stored.header.grid) == (planned.plan.rows, planned.plan.grid):
            self._store.open(entry, stored.header)
            self._store.append(entry, [*stored.features])
            self._store.finish(entry, Done(0.0, 0.0))
            metrics.items.labels("found").inc()
            return
        await self._run(entry, planned, data)
        if self._fleet and entry.done and entry.header and entry.rows:
            await self._fleet.put(entry.key, Stored(entry.header, entry.rows.features))

    async def stop(self) -> None:
        """Drop all items and end the threads."""
        self._store.clear()
        await self._batcher.stop()
        if self._fleet:
            await self._fleet.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _run(self, entry: Entry, planned: Planned, data: bytes) -> None:
        outcome = "failed"
        try:
            submitted = time.perf_counter()
            async with self._places:
                await self._batcher.room()
                decoded = await self._decode(planned, data)
                del data
                loop = asyncio.get_running_loop()
                prepared = await loop.run_in_executor(self._threads, self._preprocess, planned, decoded)
                del decoded
            self._store.hold(entry, prepared.nbytes)
            preprocessed = time.perf_counter()
            features = await self._batcher.encode(prepared)
            grid = prepared.grid
            del prepared
            done = Done(preprocessed - submitted, time.perf_counter() - preprocessed)
            _check_plan(planned, features, grid)
            self._store.open(entry, _header(features, grid))
            self._store.append(entry, features)
            self._store.finish(entry, done)
            outcome = "encoded"
            metrics.stage_seconds.labels("preprocess").observe(done.preprocess_seconds)
            metrics.stage_seconds.labels("encode").observe(done.encode_seconds)
            logs.event(logger, "encoded", logging.DEBUG, rows=planned.plan.rows, **asdict(done))
        except asyncio.CancelledError:
            outcome = "dropped"
            raise
        except ServiceError as error:
            logs.event(logger, "item failed", code=error.code.name, reason=error.reason)
            self._store.fail(entry, error)
        except Exception as error:
            logger.error("unexpected error", exc_info=error)
            text = f"internal error; the encoder's log has the details under request id {logs.request_id.get()}"
            self._store.fail(entry, ServiceError(grpc.StatusCode.INTERNAL, text))
        finally:
            metrics.items.labels(outcome).inc()


def _check_plan(planned: Planned, features: Features, grid: Grid) -> None:
    """Raise INTERNAL where the rows or their grid are not those that the prompt was laid out with."""
    plan, rows = planned.plan, features[0].shape[0]
    same_grid = grid == plan.grid or not planned.check_grid
    if rows == plan.rows and same_grid:
        return
    metrics.estimate_mismatch.inc()
    metadata: dict[str, object] = {"planned": plan.rows, "actual": rows}
    text = f"{plan.rows} rows were planned for this {plan.modality.word} and it has {rows}"
    if not same_grid:
        metadata |= {"planned_grid": _text(plan.grid), "actual_grid": _text(grid)}
        text += f"; its grid was planned as {_text(plan.grid)} and is {_text(grid)}"
    raise ServiceError(
        grpc.StatusCode.INTERNAL, f"{text}; please report this with the file", field=planned.field, reason="ESTIMATE_MISMATCH",
        metadata=metadata,
    )  # fmt: skip


def _text(grid: Grid) -> str:
    return f"{grid.t}x{grid.h}x{grid.w}"


def _header(features: Features, grid: Grid) -> Header:
    return Header(features[0].shape[0], grid, tuple((rows.shape[1], rows.dtype) for rows in features))
