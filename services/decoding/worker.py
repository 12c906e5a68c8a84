"""``python -m services.decoding.worker``: decodes one file after the other for the service that started it.

Limits are the kernel's, so that native code that hangs or runs wild ends here: what hits one dies, and the service starts
another worker. Whatever happens to this process, it ends with the service.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image

from services.decoding import sandbox, wire
from services.decoding.facts import read_sound, read_video
from services.decoding.images import decode_image
from services.decoding.refusals import Refused
from services.decoding.sound import decode_sound
from services.decoding.specs import Array, Facts, ImageSpec, SoundFactsSpec, SoundSpec, VideoFactsSpec, VideoSpec, from_header
from services.decoding.video import decode_video

_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 64
_DECODERS: dict[str, Callable[..., Facts]] = {
    ImageSpec.kind: decode_image,
    SoundSpec.kind: decode_sound,
    VideoSpec.kind: decode_video,
    SoundFactsSpec.kind: read_sound,
    VideoFactsSpec.kind: read_video,
}


class _Result:
    """The memory that the service lent for a result."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._maps: list[mmap.mmap] = []
        self.shape: tuple[int, ...] = ()

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """An array in it; a later call takes the place of an earlier one."""
        self.shape = shape
        count = int(np.prod(shape))
        try:
            self._maps.append(mmap.mmap(self._descriptor, count * np.dtype(dtype).itemsize))
        except OSError:  # no address space left, or the result is larger than the spec says
            raise MemoryError from None
        return np.frombuffer(self._maps[-1], dtype, count).reshape(shape)

    def close(self) -> None:
        """Let go of it: the service takes it only from a worker that cannot change it any more."""
        try:
            self._unmap()
        except BufferError:  # a traceback's frames may still hold an array
            gc.collect()
            self._unmap()
        os.close(self._descriptor)

    def _unmap(self) -> None:
        for mapping in self._maps:
            mapping.close()


def main() -> None:
    descriptor, parent, memory_bytes, cpu_seconds, wall_seconds = json.loads(sys.argv[1])
    _tie_to(parent)
    Image.init()
    _limit(memory_bytes)
    sandboxed = sandbox.forbid()
    sock = socket.socket(fileno=descriptor)
    sock.sendall(b"".join(wire.encode({"sandboxed": sandboxed})))
    while (request := wire.receive(sock)) is not None:
        header, data, target = request
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
        reply = _answer(header, data, target)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sock.sendall(b"".join(wire.encode(reply)))
        del data, request


def _answer(header: dict[str, Any], data: bytes, target: int) -> dict[str, Any]:
    result = _Result(target)
    try:
        facts = _DECODERS[header["kind"]](data, from_header(header), result.allocate)
        return {"shape": result.shape, **asdict(facts)}
    except Refused as refused:
        return {"refused": refused.code, "figures": refused.figures}
    except MemoryError:
        return {"refused": "DECODE_MEMORY", "figures": {}}
    except Exception:
        return {"failed": traceback.format_exc()[-2000:]}
    finally:
        result.close()


def _tie_to(parent: int) -> None:
    """End when the service ends, however it does, and not when a terminal or a supervisor ends the group: it drains first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the service is gone")


def _limit(memory_bytes: int) -> None:
    """Address space for one file on top of what is mapped now; no file can be written."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


if __name__ == "__main__":
    main()
