"""Embeddings that all encoders of a fleet share, in a Valkey or Redis server. Whatever goes wrong there, items are encoded here.

An entry is a line of JSON (rows, grid, features), a checksum, and the features' bytes. The server is trusted as the encoders
are: who may write to it decides what models see.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import redis.asyncio
import torch
import xxhash
from redis.exceptions import RedisError

from services.common import logs
from services.encoder import metrics
from services.encoder.store import Header
from services.models.media import Grid

logger = logging.getLogger(__name__)
_HEAD = struct.Struct("<4sIQ")  # magic, length of the JSON, XXH3 of what follows
_MAGIC = b"TRP1"
_PAUSE_SECONDS = 5.0  # after a failure the server is left alone for so long
_AT_ONCE = 16  # calls, which bounds connections and the entries in memory
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Stored:
    """An item's rows: features of [rows, hidden] on the CPU."""

    header: Header
    features: Sequence[torch.Tensor]

    def to_bytes(self) -> bytes:
        """As the server keeps it."""
        about = {
            "rows": self.header.rows,
            "grid": asdict(self.header.grid),
            "features": [[hidden, str(dtype)] for hidden, dtype in self.header.features],
            "kept": self.header.kept,
        }
        text = json.dumps(about).encode()
        body = b"".join([text, *(rows.contiguous().view(torch.uint8).numpy().data.cast("B") for rows in self.features)])
        return _HEAD.pack(_MAGIC, len(text), xxhash.xxh3_64_intdigest(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Stored:
        """The other way round.

        Raises:
            Exception: it is damaged, of another version, or makes no sense.
        """
        magic, length, checksum = _HEAD.unpack_from(data)
        body = memoryview(data)[_HEAD.size :]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != checksum:
            raise ValueError("damaged")
        about = json.loads(bytes(body[:length]))
        kinds = tuple((int(hidden), _DTYPES[dtype]) for hidden, dtype in about["features"])
        header, offset, features = Header(about["rows"], Grid(**about["grid"]), kinds, tuple(about["kept"])), length, []
        for hidden, dtype in kinds:
            count = header.rows * hidden
            features.append(torch.frombuffer(body, dtype=dtype, count=count, offset=offset).view(header.rows, hidden))
            offset += count * dtype.itemsize
        if offset != len(body):
            raise ValueError("another length")
        return cls(header, features)


class FleetCache:
    """A server's entries for one checkpoint.

    Args:
        url: ``redis://`` or ``rediss://`` URL.
        model: names checkpoint, processor settings and element type; entries of another one are not found.
        max_bytes: larger entries are not kept there.
        seconds: entries end so long after they were written.
        timeout: seconds that one call may take.
    """

    def __init__(self, url: str, model: str, *, max_bytes: int, seconds: float, timeout: float) -> None:
        self._client = redis.asyncio.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._prefix = f"triptych:{model}:".encode()
        self._max_bytes, self._seconds, self._timeout = max_bytes, seconds, timeout
        self._paused_until = 0.0

    async def get(self, key: bytes) -> Stored | None:
        """An entry; None where there is none or the server does not answer."""
        result, stored = await self._look_up(key)
        metrics.fleet_cache_lookups.labels(result).inc()
        return stored

    async def _look_up(self, key: bytes) -> tuple[str, Stored | None]:
        try:
            async with self._places:
                if time.monotonic() < self._paused_until:
                    return "paused", None
                async with asyncio.timeout(self._timeout):
                    data = await self._client.get(self._name(key))
                if data is None:
                    return "miss", None
                assert isinstance(data, bytes), "the client decodes nothing"
                return "hit", await asyncio.to_thread(Stored.from_bytes, data)
        except (RedisError, OSError, TimeoutError) as error:
            self._pause(error)
            return "error", None
        except Exception as error:  # an entry can say anything and still have its checksum
            logs.event(logger, "fleet cache entry ignored", logging.WARNING, cause=repr(error)[:200])
            return "damaged", None

    async def put(self, key: bytes, stored: Stored) -> None:
        """Keep an entry, if it can be."""
        if sum(rows.nbytes for rows in stored.features) > self._max_bytes:
            return
        try:
            async with self._places:
                if time.monotonic() < self._paused_until:
                    return
                data = await asyncio.to_thread(stored.to_bytes)
                async with asyncio.timeout(self._timeout):
                    await self._client.set(self._name(key), data, px=round(self._seconds * 1000))
        except (RedisError, OSError, TimeoutError) as error:
            self._pause(error)

    async def close(self) -> None:
        """Let go of the server."""
        await self._client.aclose()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _pause(self, error: Exception) -> None:
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        cause = f"{type(error).__name__}: {error}"[:200]
        logs.event(logger, "fleet cache paused", logging.WARNING, cause=cause, seconds=_PAUSE_SECONDS)
