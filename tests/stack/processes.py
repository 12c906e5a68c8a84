"""What the processes of a running stack hold: memory, open handles, workers."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE
from tests.stack.conftest import RunningStack

SERVICES = ("gateway", "encoder", "llm")
_LOOKS = 30  # that must see the same handles: connections which a client has closed go a moment later


@dataclass(frozen=True)
class Footprint:
    """One look.

    Attributes:
        memory: bytes of each service that are its own (not files, not shared), and of its workers.
        handles: open descriptors of each service but for blocks of memory.
        blocks: blocks of memory that have a descriptor: rows of a large cached item, media that are being decoded.
        workers: process ids of each service's children.
    """

    memory: dict[str, int]
    handles: dict[str, int]
    blocks: dict[str, int]
    workers: dict[str, frozenset[int]]


def footprint(stack: RunningStack) -> Footprint:
    """A look once handles are at rest."""
    deadline, same, look = time.monotonic() + PATIENCE, 0, _look(stack)
    while same < _LOOKS:
        assert time.monotonic() < deadline, look
        last, look = look, _look(stack)
        same = same + 1 if look.handles == last.handles else 0
    return look


def workers_of(pid: int) -> list[int]:
    """The process's children that are alive."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]


def _look(stack: RunningStack) -> Footprint:
    look = Footprint({}, {}, {}, {})
    for service in SERVICES:
        pid = stack.serving(service)["pid"]
        look.workers[service] = children = frozenset(workers_of(pid))
        look.memory[service] = _own_bytes(pid)
        if children:
            look.memory[f"{service}'s workers"] = sum(map(_own_bytes, children))
        opened = [_target(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        look.blocks[service] = sum(target.startswith("/memfd:") for target in opened)
        look.handles[service] = len(opened) - look.blocks[service]
    return look


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed between the two looks
        return ""


def _own_bytes(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
