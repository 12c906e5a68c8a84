"""The way of one item: decode in a worker process, preprocess in a thread, towers piece by piece, rows into the store.

The rows of a piece can be read as soon as it is through the towers. An item that fails does so alone, with an error that a
client may see; rows that were read before stay read. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

import grpc
import torch

from services.common import logs
from services.common.errors import ServiceError
from services.decoding.specs import Decoded
from services.encoder import metrics
from services.encoder.batcher import Batcher, Turn
from services.encoder.features import Features
from services.encoder.fleet_cache import FleetCache, Stored
from services.encoder.preprocess import Prepared
from services.encoder.pruning import rows_left
from services.encoder.store import Done, Entry, Header, Store
from services.models.media import Grid, ItemPlan

logger = logging.getLogger(__name__)
_LONG_COPY = 4 * 1024**2  # bytes; about a millisecond


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
Split = Callable[[Prepared], Sequence[Prepared]]


class Pipeline:
    """Turns submitted items into rows in ``store``.

    Args:
        store: where the rows go.
        batcher: runs the towers.
        decode: the file's pixels or samples.
        preprocess: makes the towers' inputs of them; called in threads.
        split: cuts those into pieces whose rows, one behind the other, are the item's.
        at_once: items decoded and preprocessed at the same time.
        fleet: rows that other encoders made, if they share them.
    """

    def __init__(
        self,
        store: Store,
        batcher: Batcher,
        decode: Decode,
        preprocess: Preprocess,
        split: Split,
        at_once: int,
        fleet: FleetCache | None = None,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._batcher = batcher
        self._decode = decode
        self._preprocess = preprocess
        self._split = split
        self._places = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, "preprocess")

    @property
    def pending_patches(self) -> int:
        """Patches of submitted items that have not been through the towers."""
        return self._batcher.pending_patches

    @property
    def encoded_patches(self) -> int:
        """Patches that have been through them."""
        return self._batcher.encoded_patches

    @property
    def batch_patches(self) -> int:
        """Patches that go through them in a batch."""
        return self._batcher.max_patches

    def submit(self, key: bytes, planned: Planned, data: bytes) -> str:
        """A ref to the item that ``key`` names; work on it starts where it is not there or under way.

        The media is let go of as soon as it is decoded.
        """
        ref = self._store.claim(key, len(data))
        if not ref.found:
            ref.entry.work = asyncio.create_task(self._run(ref.entry, planned, data), name=f"encode {ref.ref_id}")
        return ref.ref_id

    async def stop(self) -> None:
        """Drop all items and end the threads."""
        self._store.clear()
        await self._batcher.stop()
        if self._fleet:
            await self._fleet.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _run(self, entry: Entry, planned: Planned, data: bytes) -> None:
        """Rows from the fleet's cache where they are there, else from the towers. No other frame holds the media."""
        outcome = "failed"
        try:
            if self._fleet and await self._found(self._fleet, entry, planned.plan):
                outcome = "found"
                return
            with self._batcher.turn(planned.plan.patches) as turn:
                submitted = time.perf_counter()
                await self._batcher.room(turn)
                async with self._places:
                    decoded = await self._decode(planned, data)
                    del data
                    loop = asyncio.get_running_loop()
                    prepared = await loop.run_in_executor(self._threads, self._preprocess, planned, decoded)
                    del decoded
                preprocessed = time.perf_counter()
                await self._encode(entry, planned, prepared, turn)
                del prepared
            done = Done(preprocessed - submitted, time.perf_counter() - preprocessed)
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
        if self._fleet and entry.done and entry.header and entry.rows:
            await self._fleet.put(entry.key, Stored(entry.header, entry.rows.features))

    async def _found(self, fleet: FleetCache, entry: Entry, plan: ItemPlan) -> bool:
        """Whether the fleet's cache had the item, which is done then."""
        stored = await fleet.get(entry.key)
        if stored is None or (stored.header.rows, stored.header.grid) != (plan.rows, plan.grid):
            return False
        self._store.open(entry, stored.header)
        await self._append(entry, [*stored.features])
        self._store.finish(entry, Done(0.0, 0.0))
        return True

    async def _encode(self, entry: Entry, planned: Planned, prepared: Prepared, turn: Turn) -> None:
        """All rows into the store, piece by piece. Pieces share the inputs, which are held until the last is through."""
        grid, rows = prepared.grid, 0
        self._store.hold(entry, prepared.nbytes)
        _check_plan(planned, grid, None, last=False)
        pieces = self._split(prepared)
        left, whole = len(pieces), []
        async with aclosing(self._batcher.encode(turn, pieces)) as parts:
            async for features in parts:
                rows, left = rows + len(features[0]), left - 1
                _check_plan(planned, grid, rows, last=left == 0)
                if planned.plan.whole_rows:
                    whole.append(features)
                    self._store.hold(entry, entry.held_bytes + sum(part.nbytes for part in features))
                    continue
                if entry.header is None:
                    self._store.open(entry, _header(planned.plan.rows, grid, features))
                await self._append(entry, features)
        if whole:
            kept, features = await asyncio.to_thread(_prune, whole, planned.plan)
            self._store.open(entry, replace(_header(planned.plan.rows, grid, features), kept=tuple(kept.tolist())))
            await self._append(entry, features)

    async def _append(self, entry: Entry, features: Features) -> None:
        """The next rows into the store; a thread copies them where that would hold up the event loop."""
        if sum(part.nbytes for part in features) < _LONG_COPY:
            self._store.append(entry, features)
        else:
            assert entry.rows is not None, "append comes after open"
            await asyncio.to_thread(entry.rows.write, entry.ready_rows, features)
            self._store.advance(entry, len(features[0]))


def _prune(parts: Sequence[Features], plan: ItemPlan) -> tuple[torch.Tensor, Features]:
    """Which rows are left of all parts', and those."""
    whole = [torch.cat(feature) for feature in zip(*parts, strict=True)]
    kept = rows_left(whole[0], plan.grid, plan.rows)
    return kept, [feature[kept] for feature in whole]


def _check_plan(planned: Planned, grid: Grid, rows: int | None, last: bool) -> None:
    """Raise INTERNAL where the rows or their grid are not those that the prompt was laid out with.

    Args:
        planned: what it was laid out with.
        grid: how the rows are arranged.
        rows: so many there are so far; None before the first is known.
        last: whether that is all.
    """
    plan = planned.plan
    most = plan.whole_rows or plan.rows
    same_rows = rows is None or rows == most or (rows < most and not last)
    same_grid = grid == plan.grid or not planned.check_grid
    if same_rows and same_grid:
        return
    metrics.estimate_mismatch.inc()
    metadata: dict[str, object] = {"planned": most}
    text = f"{most} rows were planned for this {plan.modality.word}"
    if rows is not None:
        metadata["actual"] = rows
        text += f" and it has {rows}{'' if last else ' or more'}"
    if not same_grid:
        metadata |= {"planned_grid": _text(plan.grid), "actual_grid": _text(grid)}
        text += f"; its grid was planned as {_text(plan.grid)} and is {_text(grid)}"
    raise ServiceError(
        grpc.StatusCode.INTERNAL, f"{text}; please report this with the file", field=planned.field, reason="ESTIMATE_MISMATCH",
        metadata=metadata,
    )  # fmt: skip


def _text(grid: Grid) -> str:
    return f"{grid.t}x{grid.h}x{grid.w}"


def _header(rows: int, grid: Grid, features: Features) -> Header:
    return Header(rows, grid, tuple((part.shape[1], part.dtype) for part in features))
