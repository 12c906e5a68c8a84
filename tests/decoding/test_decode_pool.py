"""The pool: every odd file has its outcome, and whatever happens to a worker happens to one item."""

from __future__ import annotations

import asyncio
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop

from services.common.errors import ServiceError
from services.decoding import process
from services.decoding.pool import DecodePool
from services.decoding.process import Limits, Worker
from services.decoding.specs import Decoded, ImageSpec, SoundSpec, Spec, VideoSpec
from services.gateway.probe import probe_image
from tests.media_files import CASES, DATA, file_bytes, level, picture, png_header, recording, tone, video
from tests.patience import PATIENCE

FIELD = "messages[0].parts[1]"
MAX_PIXELS = 50_000_000
IMAGE = ImageSpec(MAX_PIXELS)
SOUND = SoundSpec(600 * 16000)
LIMITS = Limits(memory_bytes=512 * 1024**2, cpu_seconds=10.0, wall_seconds=40.0)


def look_at(*frames: int) -> VideoSpec:
    return VideoSpec(frames, MAX_PIXELS, 2**28)


@asynccontextmanager
async def pool_of(workers: int, limits: Limits = LIMITS, max_waiting: int = 1000) -> AsyncIterator[DecodePool]:
    pool = DecodePool(workers, limits, max_waiting)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    """As the service does."""
    uvloop.run(work)


async def whole_again(pool: DecodePool, workers: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while pool.alive < workers:
            await asyncio.sleep(0.01)


async def refused(pool: DecodePool, data: bytes, spec: Spec) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await pool.decode(data, spec, FIELD)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field == FIELD
    assert error.message.startswith(FIELD + ": ")
    assert not any(word in error.message for word in ("0x", "Traceback", "BytesIO", ".py", "{"))
    return error


def children() -> set[int]:
    """Processes that are children of this one, dead ones too."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


def held() -> tuple[int, list[str], set[int]]:
    """What could leak: descriptors, shared memory by name, processes."""
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm")), children()


def check(case: dict[str, Any], decoded: Decoded, data: bytes) -> None:
    array, name = decoded.array, case["file"]
    if case["kind"] == "image":
        height, width, _ = array.shape
        assert [width, height] == case["size"], name
        facts = probe_image(data, FIELD, max_pixels=MAX_PIXELS)
        assert (facts.width, facts.height) == (width, height), name
        for x, y, colour in case.get("pixels", []):
            assert np.abs(array[y, x].astype(int) - colour).max() <= case["within"], name
    elif case["kind"] == "audio":
        assert array.dtype == np.float32 and abs(len(array) - case["samples"]) <= case.get("within", 0), name
        if "peak" in case:
            assert np.abs(array[1000:-1000]).max() == pytest.approx(case["peak"], rel=0.02), name
        if "tail" in case:
            assert np.sqrt((array[-4000:] ** 2).mean()) >= case["tail"], name
    else:
        assert array.shape == (case["frames"], case["size"][1], case["size"][0], 3), name
        assert decoded.facts.replaced == case.get("replaced", 0), name
        if "times" in case:
            assert decoded.facts.times == pytest.approx(case["times"]), name
        if "last" in case:
            assert decoded.facts.times[-1] == pytest.approx(case["last"]), name


def test_every_odd_file_has_its_outcome() -> None:
    async def work() -> None:
        async with pool_of(2) as pool:

            async def one(case: dict[str, Any]) -> None:
                data = (DATA / case["file"]).read_bytes()
                spec = {"image": IMAGE, "audio": SOUND, "video": look_at(*range(case.get("frames", 1)))}[case["kind"]]
                if "refused" in case:
                    assert (await refused(pool, data, spec)).reason == case["refused"], case["file"]
                else:
                    check(case, await pool.decode(data, spec, FIELD), data)

            await asyncio.gather(*map(one, CASES))
            assert pool.alive == 2 and pool.restarts == 0

    run(work())


def test_workers_that_are_killed_cost_nobody_an_item() -> None:
    async def work() -> None:
        chance = random.Random(7)
        pictures = [picture(300, 200, seed) for seed in range(4)]
        files = [file_bytes(image) for image in pictures]
        async with pool_of(2) as pool:
            wrong, killed = 0, set[int]()
            over: asyncio.Queue[int] = asyncio.Queue()

            async def one(index: int) -> None:
                nonlocal wrong
                try:
                    decoded = await pool.decode(files[index % 4], IMAGE, FIELD)
                    assert np.array_equal(decoded.array, np.asarray(pictures[index % 4]))
                except ServiceError as error:
                    assert error.reason == "DECODE_CRASHED"
                    wrong += 1
                over.put_nowait(index)

            async def killer() -> None:
                for _ in range(200):
                    await over.get()
                    fresh = [pid for pid in pool.pids if pid not in killed]
                    if fresh and len(killed) < 6 and chance.random() < 0.1:
                        pid = chance.choice(fresh)
                        killed.add(pid)
                        os.kill(pid, signal.SIGKILL)

            await asyncio.gather(killer(), *map(one, range(200)))
            assert wrong <= 1  # an item fails only where two workers were shot away under it
            async with asyncio.timeout(PATIENCE):
                while pool.restarts < len(killed):
                    await asyncio.sleep(0.01)
            await whole_again(pool, 2)
            assert pool.restarts == len(killed) >= 3

    run(work())


def test_an_idle_worker_that_dies_is_replaced_unasked() -> None:
    async def work() -> None:
        async with pool_of(2) as pool:
            before = set(pool.pids)
            os.kill(pool.pids[0], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while set(pool.pids) == before or pool.alive < 2:
                    await asyncio.sleep(0.01)
            assert pool.restarts == 1 and len(pool.pids) == 2
            assert len(set(pool.pids) & before) == 1

    run(work())


def bomb(width: int, height: int) -> bytes:
    """A PNG of one colour: a few kilobytes that become width * height * 3."""

    def chunk(tag: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(b"\0" * (1 + 3 * width)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_memory_and_time_are_bounded_and_the_next_item_is_decoded() -> None:
    small = Limits(memory_bytes=96 * 1024**2, cpu_seconds=5.0, wall_seconds=20.0)

    async def work() -> None:
        good = file_bytes(picture(40, 30))

        async def fine() -> None:
            assert (await pool.decode(good, IMAGE, FIELD)).array.shape == (30, 40, 3)

        async with pool_of(1, small) as pool:
            assert (await refused(pool, png_header(60_000, 60_000), IMAGE)).reason == "IMAGE_TOO_LARGE"
            assert pool.restarts == 0
            error = await refused(pool, bomb(6000, 6000), IMAGE)
            assert error.reason == "DECODE_MEMORY" and error.metadata == {"limit": str(small.memory_bytes)}
            await fine()
            frames = [picture(16, 16, seed) for seed in range(3)]
            endless = file_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:] * 50, loop=0)
            assert (await pool.decode(endless, IMAGE, FIELD)).array.shape == (16, 16, 3)  # its first frame
            clip = video(3, size=(640, 480))
            many = VideoSpec((0, 1, 2) * 100, MAX_PIXELS, 2**28)
            assert (await refused(pool, clip, many)).reason == "VIDEO_TOO_MUCH"
            many = VideoSpec((0, 1, 2) * 50, MAX_PIXELS, 2**28)
            assert (await refused(pool, clip, many)).reason == "DECODE_MEMORY"
            await fine()
            assert pool.restarts == 2
        brief = Limits(memory_bytes=2**29, cpu_seconds=0.05, wall_seconds=20.0)
        async with pool_of(1, brief) as pool:
            slow = bomb(6000, 6000)
            assert (await refused(pool, slow, IMAGE)).reason == "DECODE_TIMEOUT"
            await fine()
            assert pool.restarts == 1

    run(work())


# Stands in for a worker whose decoder is broken or was taken over: what it does for each kind.
FAKE = """
import json, os, signal, socket, struct, sys, time
sys.path.insert(0, sys.argv[1])
from services.decoding import wire
sock = socket.socket(fileno=json.loads(sys.argv[2])[0])
def say(text):
    sock.sendall(struct.pack("<II", len(text), 0) + text)
say(b'{"ready": true}')
while (request := wire.receive(sock)) is not None:
    header, data, memory = request
    if data == b"hang": time.sleep(1000)
    elif data == b"spin":
        signal.setitimer(signal.ITIMER_PROF, 0.2)
        while True: pass
    elif data == b"crash": os.kill(os.getpid(), signal.SIGSEGV)
    elif data == b"half": sock.sendall(b"\\x10\\0"); os._exit(0)
    elif data == b"flood": sock.sendall(struct.pack("<II", 2**31, 0) + b" " * 2**20)
    elif data == b"open":  # says that it is done, and could still change the result
        import mmap; kept = mmap.mmap(memory, 300); say(b'{"shape": [10, 10, 3], "times": [], "replaced": 0}')
    elif data == b"idle": os.close(memory); say(b'{"shape": [10, 10, 3], "times": [], "replaced": 0}'); sock.sendall(b"more")
    else:
        os.close(memory)
        say(data)
"""


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = process.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", FAKE, process._ROOT, command[-1]], **options)

    monkeypatch.setattr(process.subprocess, "Popen", start)


@pytest.mark.usefixtures("fake_worker")
def test_a_worker_that_misbehaves_is_ended_and_fails_its_item_alone() -> None:
    good = b'{"shape": [10, 10, 3], "times": [], "replaced": 0}'
    bad = [
        b"[1]", b"not json", b"{}", b"[" * 100_000, b'{"shape": [10, 10], "times": [], "replaced": 0}',
        b'{"shape": [-1, 10, 3], "times": [], "replaced": 0}', b'{"shape": [100000, 100000, 3], "times": [], "replaced": 0}',
        b'{"shape": [10, 10, 3], "times": [1], "replaced": 0}', b'{"shape": [10.5, 10, 3], "times": [], "replaced": 0}',
        b'{"refused": "NO_SUCH", "figures": {}}', b'{"refused": "IMAGE_TOO_LARGE", "figures": {"width": "<b>"}}',
        b"crash", b"half", b"flood", b"open",
    ]  # fmt: skip

    async def work() -> None:
        async with pool_of(1, Limits(2**28, 1.0, 1.0)) as pool:
            for data in bad:
                before = pool.restarts
                assert (await refused(pool, data, IMAGE)).reason == "DECODE_CRASHED", data
                assert pool.restarts == before + 2, data  # tried twice
                assert (await pool.decode(good, IMAGE, FIELD)).array.shape == (10, 10, 3)
            for data in (b"hang", b"spin"):
                before = pool.restarts
                assert (await refused(pool, data, IMAGE)).reason == "DECODE_TIMEOUT", data
                assert pool.restarts == before + 1, data
                assert (await pool.decode(good, IMAGE, FIELD)).array.shape == (10, 10, 3)
            assert (await refused(pool, b'{"refused": "IMAGE_TOO_LARGE", "figures": {}}', IMAGE)).reason == "IMAGE_TOO_LARGE"
            with pytest.raises(ServiceError) as caught:
                await pool.decode(b'{"failed": "File /secret/path.py"}', IMAGE, FIELD)
            assert caught.value.code is grpc.StatusCode.INTERNAL and "secret" not in caught.value.message
            before = pool.restarts
            await pool.decode(b"idle", IMAGE, FIELD)
            async with asyncio.timeout(PATIENCE):
                while pool.restarts == before:
                    await asyncio.sleep(0.01)
            assert (await pool.decode(good, IMAGE, FIELD)).array.shape == (10, 10, 3)

    run(work())


def test_a_result_can_be_written_by_nobody_but_its_owner() -> None:
    async def work() -> None:
        async with pool_of(1) as pool:
            first = await pool.decode(file_bytes(picture(60, 40, 1)), IMAGE, FIELD)
            second = await pool.decode(file_bytes(picture(60, 40, 1)), IMAGE, FIELD)
            first.array[:] = 0
            assert np.array_equal(second.array, np.asarray(picture(60, 40, 1)))

    run(work())


def test_nothing_leaks_over_many_mixed_items() -> None:
    async def work() -> None:
        clip = video(30)
        good: list[tuple[bytes, Spec, tuple[int, ...]]] = [
            (file_bytes(picture(64, 48)), IMAGE, (48, 64, 3)),
            (file_bytes(picture(64, 48), "JPEG"), IMAGE, (48, 64, 3)),
            (recording(tone(0.5, 48000, 2), 48000, "flac", "flac", "s16"), SOUND, (8000,)),
            (clip, look_at(0, 29), (2, 48, 64, 3)),
        ]
        bad: list[tuple[bytes, Spec]] = [(b"nothing", IMAGE), (clip, SOUND), (b"", look_at(0)), (clip, look_at(30))]
        before = held()
        async with pool_of(2) as pool:
            inside = held()

            async def one(index: int) -> None:
                if index % 3 == 2:
                    await refused(pool, *bad[index // 3 % 4])
                else:
                    data, spec, shape = good[index % 4]
                    assert (await pool.decode(data, spec, FIELD)).array.shape == shape

            await asyncio.gather(*map(one, range(300)))
            assert pool.restarts == 0
            assert held() == inside
        descriptors, names, processes = held()
        assert (names, processes) == (before[1], before[2])
        assert descriptors <= before[0] + 1  # a thread's

    run(work())


def test_who_stops_waiting_frees_the_place_when_the_worker_is_done() -> None:
    async def work() -> None:
        data = file_bytes(picture(900, 700))
        async with pool_of(1, max_waiting=4) as pool:
            tasks = [asyncio.create_task(pool.decode(data, IMAGE, FIELD)) for _ in range(4)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[2].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False, True, False]
            assert pool.restarts == 0

    run(work())


def test_more_than_may_wait_are_turned_away() -> None:
    async def work() -> None:
        data = file_bytes(picture(900, 700))
        async with pool_of(1, max_waiting=3) as pool:
            results = await asyncio.gather(*(pool.decode(data, IMAGE, FIELD) for _ in range(8)), return_exceptions=True)
            errors = [result for result in results if isinstance(result, ServiceError)]
            assert len(errors) == 4 and all(error.code is grpc.StatusCode.RESOURCE_EXHAUSTED for error in errors)
            assert all(error.retry_delay for error in errors)
        with pytest.raises(ServiceError) as caught:
            await pool.decode(data, IMAGE, FIELD)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE

    run(work())


def test_a_result_without_a_descriptor_left_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        data = file_bytes(picture(40, 30))
        async with pool_of(1) as pool:
            with monkeypatch.context() as patch, pytest.raises(OSError, match="none left"):
                patch.setattr(process.os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("none left")))
                await pool.decode(data, IMAGE, FIELD)
            assert (await pool.decode(data, IMAGE, FIELD)).array.shape == (30, 40, 3)

    run(work())


def test_stopping_in_the_middle_ends_every_worker() -> None:
    async def work() -> None:
        before = children()
        pool = DecodePool(2, LIMITS, 100)
        await pool.start()
        clip = video(60, size=(640, 480))
        tasks = [asyncio.create_task(pool.decode(clip, look_at(*range(50)), FIELD)) for _ in range(6)]
        await asyncio.sleep(0)
        os.kill(pool.pids[0], signal.SIGKILL)
        await pool.stop()
        assert children() == before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work())


OWNER = """
import asyncio, sys
from services.decoding.pool import DecodePool
from services.decoding.process import Limits
async def main():
    pool = DecodePool(2, Limits(2**28, 10.0, 40.0), 8)
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def test_workers_end_with_a_service_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=process._ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        handles = [os.pidfd_open(pid) for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a supervisor ends the whole group: the service drains with its workers
            os.kill(pid, signal.SIGINT)
        assert not select.select(handles, [], [], 0.2)[0]
        owner.kill()
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "it outlives the service"
            os.close(handle)


def test_a_worker_imports_neither_torch_nor_grpc_and_stays_small() -> None:
    async def work() -> None:
        worker = Worker(LIMITS)
        await worker.ready()
        try:
            maps = Path(f"/proc/{worker.pid}/maps").read_text()
            assert "torch" not in maps and "grpc" not in maps and "cygrpc" not in maps
            resident = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            assert resident < 150 * 1024**2
            assert len(os.listdir(f"/proc/{worker.pid}/task")) == 1
            assert worker.sandboxed
        finally:
            await worker.close()

    run(work())


def test_frames_of_a_video_come_through_unharmed() -> None:
    async def work() -> None:
        async with pool_of(1) as pool:
            decoded = await pool.decode(video(60, g="12"), look_at(3, 3, 50), FIELD)
            levels = np.median(decoded.array.reshape(3, -1), axis=1)
            assert np.abs(levels - [level(3), level(3), level(50)]).max() <= 6
            assert decoded.facts.times == pytest.approx([0.12, 0.12, 2.0]) and math.isclose(decoded.nbytes, 3 * 64 * 48 * 3)

    run(work())
