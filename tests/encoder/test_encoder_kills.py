"""Workers that are killed, bombs and a thousand readers that leave: afterwards the encoder holds what it held before."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from encoder_harness import Client, running

from services.common.errors import ServiceError
from services.common.shared_memory import this_place
from services.encoder.preprocess import Prepared
from services.models.media import ItemPlan, Recording
from tests.media_files import DATA, file_bytes, picture, recording, tone
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2

READERS, AT_ONCE, KILLS, WORKERS = 1000, 16, 8, 2
LEASE = 1.0  # seconds
CACHE_BYTES = 2**20
BOMBS = ("bomb_400mp.png", "bomb_88mp.png", "ztxt_bomb.png", "truncated.png", "rate_forged.flac", "no_samples.wav")


@dataclass(frozen=True)
class Item:
    """A file with its plan; a bomb's is that of a file which is none."""

    data: bytes
    plan: ItemPlan
    bomb: bool = False


def items_of(client: Client) -> list[Item]:
    checkpoint = client.checkpoint
    # the last two are so large that others may map their rows; all the others' rows come as messages
    sizes = [(40 + 9 * index, 200 - 7 * index) for index in range(20)] + [(1000, 900), (1100, 800)]
    items = [Item(file_bytes(picture(*size, seed)), checkpoint.plan_image(*size)) for seed, size in enumerate(sizes)]
    for length in (3000, 8000):
        wav = recording(tone(length / 16000, 16000), 16000, "wav", "pcm_s16le", "s16")
        items.append(Item(wav, checkpoint.plan([Recording(length)])[0]))
    for name in BOMBS:
        like = items[-1] if name.endswith((".flac", ".wav")) else items[0]
        items.append(Item((DATA / "cases" / name).read_bytes(), like.plan, bomb=True))
    return items


async def encode(client: Client, item: Item) -> str:
    plan = item.plan
    return await client.encode(
        item.data, plan.rows, media_pb2.Grid(t=plan.grid.t, h=plan.grid.h, w=plan.grid.w), modality=int(plan.modality),
        field=f"parts[0].{plan.modality.word}", patches=plan.patches, tiles=plan.tiles, samples=plan.samples,
    )  # fmt: skip


async def read_some(client: Client, items: list[Item], chance: random.Random, seen: Counter[str]) -> None:
    """Read as many events as chance will have it, and leave; of the refs some are released and some left to their leases."""
    refs = [await encode(client, item) for item in items]
    wanted = [encoder_pb2.FetchItem(ref_id=ref) for ref in refs]
    place = this_place() if chance.random() < 0.5 else ""
    request = encoder_pb2.FetchRequest(items=wanted, max_chunk_bytes=chance.choice((256, 4096, 10**6)), place=place)
    call = client.stub.Fetch(request, timeout=60)
    left = chance.choice((0, 0, 1, 2, 5, 10**6))
    if left:
        async for event in call:
            seen[str(event.WhichOneof("event"))] += 1
            if event.HasField("error"):
                error = ServiceError.from_proto(event.error)
                if error.reason == "REF_NOT_FOUND":  # on a machine that has no time its lease ended before it was asked for
                    seen["late"] += 1
                    continue
                bomb = items[event.item].bomb
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.message.startswith("parts[0]."), error
                assert bomb or error.reason == "DECODE_CRASHED", error
                seen["crashed"] += error.reason == "DECODE_CRASHED"
            left -= 1
            if not left:
                break
    call.cancel()
    await client.release(*(ref for ref in refs if chance.random() < 0.5))


def handles() -> Counter[str]:
    """This process's open descriptors by kind, but for rows of cached items; decoded media have one each."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            target = os.readlink(entry)
            kinds[target if target.startswith("/memfd") else target.partition(":")[0]] += 1
    del kinds["/memfd:triptych (deleted)"]
    return kinds


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing goes but what nobody refers to: what only the collector of cycles would free counts as left behind."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.asyncio
async def test_a_thousand_readers_leave_nothing_behind(checkpoint_dir: Callable[[str], Path], no_collector: None) -> None:
    chance, seen = random.Random(13), Counter[str]()
    path = checkpoint_dir("qwen2_5_omni_thinker")
    async with running(path, lease_seconds=LEASE, embedding_cache_bytes=CACHE_BYTES, decode_workers=WORKERS) as client:
        items, pool = items_of(client), client.service._pool
        start = await client.load()
        for item in items:  # threads and connections are there from here on
            ref = await encode(client, item)
            (found,) = await client.fetch(ref)
            assert (found.error is not None) == item.bomb
            await client.release(ref)
        await client.wait_until(lambda load: load.tasks == start.tasks)
        held = handles()
        first_pids, killed = set(pool.pids), set[int]()
        gate = asyncio.Semaphore(AT_ONCE)

        async def reader(number: int) -> None:
            async with gate:
                if number % (READERS // KILLS) == 0 and pool.pids:  # else all are being replaced
                    pid = chance.choice(pool.pids)
                    killed.add(pid)
                    with suppress(ProcessLookupError):  # killed before, and the pool has not noticed yet
                        os.kill(pid, signal.SIGKILL)
                await read_some(client, chance.choices(items, k=chance.choice((1, 1, 1, 3))), chance, seen)

        async with asyncio.TaskGroup() as group:
            for number in range(READERS):
                group.create_task(reader(number))
        end = await client.wait_until(lambda load: not load.refs and load.tasks == start.tasks)
        assert (end.held_bytes, end.pending_items, end.refs) == (start.held_bytes, start.pending_items, start.refs) == (0, 0, 0)
        assert end.cached_bytes <= CACHE_BYTES
        client.service.store.check_integrity()
        assert min(seen[kind] for kind in ("header", "chunk", "ready", "done", "error")) > 5, seen
        deadline = time.monotonic() + PATIENCE
        while pool.restarts < len(killed) or pool.alive < WORKERS or handles() != held:
            assert time.monotonic() < deadline, (pool.restarts, killed, pool.alive, handles(), held)
            await asyncio.sleep(0.02)
        assert len(killed) >= WORKERS and seen["crashed"] <= pool.restarts, (killed, pool.restarts, seen)
        assert not [thing for thing in gc.get_objects() if isinstance(thing, Prepared)]
        assert len(pool.pids) == WORKERS and set(pool.pids) != first_pids
        (again,) = await client.fetch(await encode(client, items[0]))
        assert again.done is not None and len(again.rows()) == items[0].plan.rows


@pytest.mark.asyncio
async def test_an_item_that_is_dropped_in_the_towers_is_freed_at_once(
    checkpoint_dir: Callable[[str], Path], no_collector: None
) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        start, batcher = await client.load(), client.service.servicer.pipeline._batcher
        encode_batch, entered, gate = batcher._encode, threading.Event(), threading.Event()

        def gated(batch: Any) -> Any:
            entered.set()
            assert gate.wait(PATIENCE)
            return encode_batch(batch)

        batcher._encode = gated
        ref = await client.encode_picture(picture(90, 60))
        assert await asyncio.to_thread(entered.wait, 10)
        await client.release(ref)
        gate.set()
        await client.wait_until(lambda load: load.tasks == start.tasks)
        deadline = time.monotonic() + PATIENCE
        while [thing for thing in gc.get_objects() if isinstance(thing, Prepared)]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
