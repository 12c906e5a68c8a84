"""Drives another engine's process: it starts once, then runs a load each time it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from bench.measure import Cost

_ROOT = Path(__file__).resolve().parents[2]
_LAST_LINES = 3
_END_SECONDS = 60.0


class Ended(RuntimeError):
    """The process is gone; the text says how it went, with the last lines of its log where it keeps one."""


class Incumbent:
    """A process that reads the name of a load's file from each line and prints ``{"cpu": seconds, "wall": seconds}`` for it.

    A context manager.

    Args:
        command: how it is started.
        log: where its stderr goes; without it, to ours.
    """

    def __init__(self, command: list[str], log: Path | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._log = log
        self._errors = log.open("w") if log else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment, cwd=_ROOT
        )

    def run(self, load: Path) -> Cost:
        """Run a load once.

        Raises:
            Ended: the process could not start, or ended meanwhile.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{load}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        for line in self._process.stdout:
            if line.startswith("{"):  # the engine's own chatter may stand between
                return Cost(**json.loads(line))
        raise self._ended()

    def _ended(self) -> Ended:
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if self._log else []
        return Ended("\n  ".join([ending(self._process.wait()), *lines]))

    def __enter__(self) -> Incumbent:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, with a load unread
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._errors:
            self._errors.close()


def ending(code: int) -> str:
    """An exit code in words; negative ones are signals."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
