"""CPU seconds and memory of processes with all that they started, from Linux' /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """A process and all processes under it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds on CPUs so far, of those processes and of children of theirs that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[i]) for i in (11, 12, 13, 14))  # own and waited-for children's, user and system
    return total / _TICKS


def peak_mebibytes(pids: Iterable[int]) -> float:
    """Sum of the most memory that each has had resident."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return round(total / 1024, 1)


class Meter:
    """What services cost from now on.

    Args:
        services: a process id for each name.
    """

    def __init__(self, services: Mapping[str, int]) -> None:
        self._services = dict(services)
        self._start = self._now()

    def read(self) -> dict[str, Any]:
        """CPU seconds since the start and the peak memory, of each service and of all."""
        now = self._now()
        spent = {name: round(now[name] - self._start[name], 3) for name in now}
        memory = {name: peak_mebibytes(descendants(pid)) for name, pid in self._services.items()}
        return {"cpu_s": {**spent, "all": round(sum(spent.values()), 3)}, "peak_mib": memory}

    def _now(self) -> dict[str, float]:
        return {name: cpu_seconds(descendants(pid)) for name, pid in self._services.items()}


def services_under(pid: int) -> dict[str, int]:
    """Triptych's services among the children of ``triptych up``, by name."""
    found: dict[str, int] = {}
    for child in descendants(pid)[1:]:
        words = _command(child)
        name = next((word.removeprefix("services.") for word in words if word.startswith("services.")), "")
        if name in ("gateway", "encoder", "llm"):
            found[name if name not in found else f"{name}-{child}"] = child
    return found


def backends_under(pid: int) -> dict[str, str]:
    """The addresses of the encoder and the language model that the gateway under ``triptych up`` was started with."""
    words = _command(services_under(pid)["gateway"])
    return {name: words[words.index(f"--{name}") + 1] for name in ("encoder", "llm")}


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Keep a process, all that it started and all their threads on these CPUs; what they start from now on stays there too."""
    cpus = set(cpus)
    for process in descendants(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cpus)


@contextlib.contextmanager
def starting_on(cpus: Iterable[int]) -> Iterator[None]:
    """What starts in the block stays on these CPUs; this process keeps off them from then on, where it has others."""
    cpus, own = set(cpus), os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own - cpus or own)


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
