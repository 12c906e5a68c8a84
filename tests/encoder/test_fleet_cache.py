"""Embeddings shared through a real Valkey or Redis server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import torch
import xxhash
from encoder_harness import running
from prometheus_client import REGISTRY

from services.encoder.config import EncoderConfig
from services.encoder.fleet_cache import FleetCache, Stored
from services.encoder.service import EncoderService
from services.encoder.store import Header
from services.models.media import Grid
from tests.media_files import picture
from tests.patience import PATIENCE

pytestmark = pytest.mark.asyncio
Dirs = Callable[[str], Path]
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


@dataclass
class Server:
    """A running server, and how it is stopped and found."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if SERVER is None:
        pytest.skip("needs valkey-server or redis-server (Debian: apt-get install redis-server)")
    path = tmp_path / "server.sock"
    command = [SERVER, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if b"Ready to accept connections" in line or b"server is now ready" in line.lower():
            break
    found = Server(f"unix://{path}", process)
    yield found
    found.stop()
    process.stdout.close()


def lookups(result: str) -> float:
    return REGISTRY.get_sample_value("triptych_encoder_fleet_cache_lookups_total", {"result": result}) or 0.0


def stored() -> Stored:
    features = [torch.randn(5, 8), torch.randn(5, 3).to(torch.bfloat16)]
    return Stored(Header(5, Grid(1, 1, 5), ((8, torch.float32), (3, torch.bfloat16))), features)


async def test_entries_survive_their_bytes_and_damage_is_seen() -> None:
    item = stored()
    data = item.to_bytes()
    again = Stored.from_bytes(data)
    assert again.header == item.header
    assert all(a.equal(b) for a, b in zip(again.features, item.features, strict=True))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises((ValueError, struct.error)):
            Stored.from_bytes(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises((ValueError, struct.error)):
            Stored.from_bytes(data[:length])


async def test_one_encoder_finds_what_another_made(checkpoint_dir: Dirs, server: Server) -> None:
    options = {"fleet_cache_url": server.url, "fleet_cache_timeout": 5.0}
    image = picture(60, 60)
    async with running(checkpoint_dir("qwen2_vl"), **options) as first:
        (made,) = await first.fetch(await first.encode_picture(image))
        await first.wait_until(lambda load: server.client.dbsize() == 1)
    hits = lookups("hit")
    async with running(checkpoint_dir("qwen2_vl"), **options) as second:
        second.service.servicer.pipeline._decode = None  # nothing may be decoded
        (found,) = await second.fetch(await second.encode_picture(image))
        assert found.rows().equal(made.rows()) and found.header == made.header
        assert lookups("hit") == hits + 1
        (salted,) = await second.fetch(await second.encode_picture(image, cache_salt="other"))
        assert salted.error is not None, "another tenant's picture is decoded"
    assert 0 < server.client.ttl(server.client.keys()[0]) <= 3600


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[]",
        b'{"rows": 1e999, "grid": {"t": 1, "h": 1, "w": 1}, "features": [[4, "torch.float32"]], "kept": []}',
        b'{"rows": 1%s, "grid": {"t": 1, "h": 1, "w": 1}, "features": [[4, "torch.float32"]], "kept": []}' % (b"0" * 30),
    ],
    ids=["deep", "a list", "infinite", "huge"],
)
async def test_an_entry_that_makes_no_sense_is_none(text: bytes) -> None:
    async def get(name: bytes) -> bytes:
        return struct.pack("<4sIQ", b"TRP1", len(text), xxhash.xxh3_64_intdigest(text)) + text

    fleet = FleetCache("redis://nowhere", "model", max_bytes=10_000, seconds=60, timeout=5)
    fleet._client = SimpleNamespace(get=get)
    before = lookups("damaged")
    assert await fleet.get(b"key") is None and lookups("damaged") == before + 1


async def test_another_checkpoint_finds_nothing(checkpoint_dir: Dirs, server: Server) -> None:
    def cache(model: str) -> FleetCache:
        return FleetCache(server.url, model, max_bytes=10_000, seconds=60, timeout=5)

    one, other = cache("one:float32"), cache("one:bfloat16")
    await one.put(b"key", stored())
    assert await one.get(b"key") is not None and await other.get(b"key") is None
    small = FleetCache(server.url, "small", max_bytes=10, seconds=60, timeout=5)
    await small.put(b"key", stored())
    assert await small.get(b"key") is None and server.client.dbsize() == 1
    await asyncio.gather(one.close(), other.close(), small.close())


async def test_more_lookups_than_connections_wait_for_one(server: Server) -> None:
    fleet = FleetCache(server.url, "many", max_bytes=10_000, seconds=60, timeout=30)
    await asyncio.gather(*(fleet.put(bytes([number]), stored()) for number in range(40)))
    assert server.client.dbsize() == 40
    assert None not in await asyncio.gather(*(fleet.get(bytes([number])) for number in range(40)))
    await fleet.close()


async def test_encoders_that_decode_otherwise_share_nothing(checkpoint_dir: Dirs) -> None:
    """nvJPEG's pixels are not libjpeg-turbo's to the bit."""
    fleets = []
    for decoder in ("workers", "gpu"):
        config = EncoderConfig(model=str(checkpoint_dir("llava")), jpeg_decoder=decoder, fleet_cache_url="redis://nowhere")
        fleets.append(EncoderService(config)._fleet(SimpleNamespace(dtype=torch.float32)))  # type: ignore[arg-type]
    one, other = fleets
    assert one is not None and other is not None and one._prefix != other._prefix
    await asyncio.gather(one.close(), other.close())


async def test_no_request_fails_whatever_the_server_does(checkpoint_dir: Dirs, server: Server) -> None:
    """It holds rubbish, it hangs, it is gone: items are encoded here."""
    options = {"fleet_cache_url": server.url, "fleet_cache_timeout": 0.2}
    async with running(checkpoint_dir("qwen2_vl"), **options) as client:

        async def encodes(seed: int) -> None:
            (item,) = await client.fetch(await client.encode_picture(picture(60, 60, seed)))
            assert item.done is not None
            await client.wait_until(lambda load: load.pending_items == 0)

        fleet = client.service.servicer.pipeline._fleet
        await encodes(1)
        await client.wait_until(lambda load: server.client.dbsize() == 1)
        (name,) = server.client.keys()
        client.service.store.clear()
        server.client.set(name, b"rubbish")
        damaged = lookups("damaged")
        await encodes(1)
        assert lookups("damaged") == damaged + 1
        server.client.execute_command("CLIENT", "PAUSE", "600000")
        errors, paused = lookups("error"), lookups("paused")
        await encodes(2)
        await encodes(3)
        assert (lookups("error"), lookups("paused")) == (errors + 1, paused + 1)
        server.stop()
        fleet._paused_until = 0.0
        await encodes(4)
        assert lookups("error") == errors + 2


async def test_a_server_that_never_was_fails_nothing(checkpoint_dir: Dirs) -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        async with running(checkpoint_dir("qwen2_vl"), fleet_cache_url=url) as client:
            (item,) = await client.fetch(await client.encode_picture(picture(60, 60)))
            assert item.done is not None
