"""One service process: starts it, reads its log, notices its end. It does not know what the service does."""

import collections
import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeAlias

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TAIL = 20

Event: TypeAlias = "Child | signal.Signals"


class Child:
    """A process that logs JSON lines to stderr and says `"event": "serving"` with its address when it listens; one that also
    listens for HTTP has said so in an `http_address` before.

    It has a session of its own, so that Ctrl-C does not reach it, and on Linux it dies with its parent. It puts itself
    into `events` when it starts serving and when it has ended. Make it on the main thread.
    """

    def __init__(
        self, name: str, command: list[str], events: "queue.SimpleQueue[Event]", log: Path | None, *, echo: bool
    ) -> None:
        self.name = name
        self.log = log
        self.address: str | None = None
        self.http_address: str | None = None
        self.returncode: int | None = None
        self.seconds = 0.0
        self._echo = echo
        self._events = events
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self._start = time.monotonic()
        parent = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def terminate(self) -> None:
        """Asks it to drain and end; nothing happens if it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it, with the processes that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.returncode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def errors(self) -> list[str]:
        """Its last log lines about errors, or its last lines if there are none."""
        return [line for line in self._tail if _is_error(line)] or list(self._tail)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._process.stdout)
            log = stack.enter_context(self.log.open("w", buffering=1)) if self.log else None
            for line in self._process.stdout:
                self._tail.append(line.rstrip("\n"))
                if log:
                    log.write(line)
                if self._echo:
                    sys.stderr.write(f"[{self.name}] {line}")
                record = _record(line)
                if "http_address" in record:
                    self.http_address = str(record["http_address"])
                if self.address is None and record.get("event") == "serving":
                    self.seconds = time.monotonic() - self._start
                    self.address = str(record["address"])
                    self._events.put(self)

    def _wait(self) -> None:
        code = self._process.wait()
        self._reader.join(timeout=1.0)
        self.returncode = code
        self._events.put(self)


def _record(line: str) -> dict[str, object]:
    """A log line's fields; none if it is not JSON."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


def _is_error(line: str) -> bool:
    record = _record(line)
    return not record or str(record.get("level", "")).lower() in ("error", "critical", "fatal")


def _die_with(parent: int) -> None:
    """In the child, before exec: be killed when the parent ends, even if it ended already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
