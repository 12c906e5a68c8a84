"""Runs ``triptych up`` around a block of code: the real processes, on free ports, drained at the end."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 90.0


@dataclass(frozen=True)
class LocalStack:
    """A running stack: the gateway's addresses for gRPC and for HTTP, and the process of ``triptych up``."""

    address: str
    http_address: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """Drain the stack; returns the exit code of ``triptych up``."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def local_stack(*flags: str, quiet: bool = False, log_dir: Path | None = None) -> Iterator[LocalStack]:
    """Start the stack with these flags of ``triptych up`` and wait until it is ready.

    Raises:
        RuntimeError: it ended before it was ready; its own messages are on stderr.
    """
    command = [sys.executable, "-m", "triptych", "up", "--grpc-port", "0", "--http-port", "0", *flags]
    if log_dir is not None:
        command += ["--log-dir", str(log_dir)]
    errors = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    ready = re.fullmatch(r"ready grpc=(\S+) http=(\S+)\n", process.stdout.readline())  # it reads nothing when it ended
    if ready is None:
        raise RuntimeError(f"`{' '.join(command)}` ended with exit code {process.wait(STOP_SECONDS)} before it was ready")
    stack = LocalStack(ready[1], ready[2], process)
    try:
        yield stack
    finally:
        stack.stop()
        process.stdout.close()
