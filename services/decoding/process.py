"""One worker, from the service's side: started, asked, ended. What it answers is checked as if a client had sent it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import services
from services.decoding import wire
from services.decoding.refusals import TEXTS, Refused
from services.decoding.specs import Array, Decoded, Facts, ImageSpec, SoundFactsSpec, Spec, VideoFactsSpec, VideoSpec, to_header

START_SECONDS = 60.0
_GRACE_SECONDS = 1.0  # for the worker's own timer, which fires first
_ROOT = str(Path(services.__file__).parents[1])
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "VIRTUAL_ENV", "PYTHONHOME")


@dataclass(frozen=True)
class Limits:
    """What one file may cost.

    Attributes:
        memory_bytes: address space, on top of an idle worker's.
        cpu_seconds: processor time.
        wall_seconds: time until the answer is there.
    """

    memory_bytes: int
    cpu_seconds: float
    wall_seconds: float


class WorkerLost(Exception):
    """A worker that is of no more use; ``timed_out`` where a time limit is why."""

    def __init__(self, why: str, *, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class WorkerFailed(Exception):
    """A mistake in the decoders, with the worker's traceback as its text: for logs only."""


class Worker:
    """A running worker. Start it from the thread that lives as long as the service: the kernel ends it with that thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        settings = json.dumps(
            [theirs.fileno(), os.getpid(), limits.memory_bytes, limits.cpu_seconds, limits.wall_seconds + _GRACE_SECONDS]
        )
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # One allocator arena: others would each reserve address space, which is limited.
        environment |= {"PYTHONPATH": _ROOT, "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "1"}
        environment |= dict.fromkeys(_THREADS, "1")
        with theirs, _closed_on_error(self._socket):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.decoding.worker", settings],
                cwd="/", env=environment, pass_fds=(theirs.fileno(),), process_group=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self.alive = True
        self.sandboxed = False

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it has loaded its decoders. ``sandboxed`` says then whether the kernel filters its system calls.

        Raises:
            WorkerLost: it ended, or took too long.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                self.sandboxed = (await self._reply()).get("sandboxed") is True
        except (OSError, ValueError, TimeoutError) as error:
            raise WorkerLost(f"did not start: {error!r}") from None

    async def decode(self, data: bytes, spec: Spec) -> Decoded:
        """Have a file decoded.

        Raises:
            Refused: the file is not decoded, and that is the file's fault.
            WorkerFailed: it is not, and that is ours.
            WorkerLost: the worker ended, or must be ended, with :meth:`close`.
        """
        with _lent(spec.most_bytes) as memory:
            try:
                async with asyncio.timeout(self._limits.wall_seconds):
                    reply = await self._ask(data, spec, memory)
            except TimeoutError:
                raise WorkerLost("out of time", timed_out=True) from None
            except (OSError, ValueError) as error:  # its end closes the socket
                raise await self._ended(error) from None
            try:
                return _checked(reply, spec, memory)
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                raise WorkerLost(f"a reply that cannot be: {type(error).__name__}") from None

    async def close(self) -> None:
        """End it at once, and wait until it is gone."""
        self.alive = False
        self.unwatch()
        self._socket.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def watch(self, lost: Callable[[], None]) -> None:
        """Call ``lost`` when it ends, or speaks out of turn, while nobody asks it anything."""
        asyncio.get_running_loop().add_reader(self._socket, lost)

    def unwatch(self) -> None:
        """Stop watching, before asking it something."""
        asyncio.get_running_loop().remove_reader(self._socket)

    async def _ask(self, data: bytes, spec: Spec, memory: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        lengths, text = wire.encode(to_header(spec), len(data))
        socket.send_fds(self._socket, [lengths], [memory])  # fits: nothing is under way
        await loop.sock_sendall(self._socket, text)
        await loop.sock_sendall(self._socket, data)
        return await self._reply()

    async def _reply(self) -> dict[str, Any]:
        size, raw = wire.LENGTHS.unpack(await self._exactly(wire.LENGTHS.size))
        if raw or size > wire.MOST_REPLY:
            raise ValueError("too long")
        try:
            reply = json.loads(await self._exactly(size))
        except RecursionError:
            raise ValueError("too deep") from None
        if not isinstance(reply, dict):
            raise ValueError("no object")
        return reply

    async def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(parts), 65536))
            if not part:
                raise ConnectionResetError("it ended")
            parts += part
        return bytes(parts)

    async def _ended(self, error: Exception) -> WorkerLost:
        self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        return WorkerLost(f"{error}; exit code {code}", timed_out=-code in (signal.SIGPROF, signal.SIGALRM))


@contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    """Close it where what follows fails."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


@contextmanager
def _lent(size: int) -> Iterator[int]:
    """A descriptor of memory for a result: pages come into being where they are written; its size cannot be changed."""
    memory = os.memfd_create("decoded", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, max(size, 1))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield memory
    finally:
        os.close(memory)


def _checked(reply: dict[str, Any], spec: Spec, memory: int) -> Decoded:
    """The result, or what the reply says instead; OSError, ValueError, KeyError or TypeError where it makes no sense."""
    if "failed" in reply:
        raise WorkerFailed(str(reply["failed"])[:4000])
    if "refused" in reply:
        figures = {str(name): _count(value) for name, value in dict(reply["figures"]).items()}
        if reply["refused"] not in TEXTS:
            raise ValueError("no such code")
        raise Refused(reply["refused"], **figures)
    shape = tuple(_count(side) for side in reply["shape"])
    fits = len(shape) == spec.dimensions and all(shape) and math.prod(shape) * np.dtype(spec.dtype).itemsize <= spec.most_bytes
    if not fits or (isinstance(spec, ImageSpec | VideoSpec) and shape[-1] != 3):
        raise ValueError("no such shape")
    times, replaced = tuple(float(time) for time in reply["times"]), _count(reply["replaced"])
    frames = spec.frames if isinstance(spec, VideoSpec) else ()
    if len(times) != len(frames) or not all(map(math.isfinite, times)) or (frames and shape[0] != len(frames)):
        raise ValueError("no such frames")
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # fails while the worker could still change it
    count = math.prod(shape)
    mapping = mmap.mmap(memory, count * np.dtype(spec.dtype).itemsize, access=mmap.ACCESS_COPY)
    array = np.frombuffer(mapping, spec.dtype, count).reshape(shape)
    if isinstance(spec, VideoFactsSpec):
        return Decoded(array, _clip_facts(reply, array, spec))
    if isinstance(spec, SoundFactsSpec) and not 0 < array[0] <= spec.max_samples:
        raise ValueError("no such length")
    return Decoded(array, Facts(times, replaced))


def _clip_facts(reply: dict[str, Any], times: Array, spec: VideoFactsSpec) -> Facts:
    """What is said of a video; ValueError where it cannot be."""
    facts = Facts(width=_count(reply["width"]), height=_count(reply["height"]), fps=float(reply["fps"]))
    if not 0 < facts.width * facts.height <= spec.max_pixels or not 0 < facts.fps < math.inf:
        raise ValueError("no such size or rate")
    if times[0] != 0 or not np.isfinite(times).all() or not (np.diff(times) >= 0).all():
        raise ValueError("no such times")
    return facts


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("no count")
    return value
