"""Drives another engine's process: it starts once, then runs a load each time it is told to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType

from bench.measure import Cost

_ROOT = Path(__file__).resolve().parents[2]


class Incumbent:
    """A process that reads the name of a load's file from each line and prints ``{"cpu": seconds, "wall": seconds}`` for it.

    A context manager.

    Raises:
        RuntimeError: the process ended.
    """

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=_ROOT
        )

    def run(self, load: Path) -> Cost:
        """Run a load once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{load}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # the engine's own chatter may stand between
                return Cost(**json.loads(line))
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")

    def __enter__(self) -> Incumbent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
