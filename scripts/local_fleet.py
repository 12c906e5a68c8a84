"""Several encoders and language models behind a gateway, each a process that may be killed and started again where it was."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from triptych.cli.child import Child, Event
from triptych.client import Client

READY_SECONDS = 120.0


class LocalFleet:
    """Running processes.

    Attributes:
        members: by kind, "encoder", "llm" and "gateway", and by address.
    """

    def __init__(self, model: str, log_dir: Path, flags: Sequence[str]) -> None:
        self._model, self._log_dir, self._flags = ["--model", model], log_dir, list(flags)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._started: list[Child] = []
        self.members: dict[str, dict[str, Child]] = {"encoder": {}, "llm": {}, "gateway": {}}

    @property
    def address(self) -> str:
        """The gateway's."""
        return next(iter(self.members["gateway"]))

    def start(self, encoders: int, llms: int) -> None:
        """Start everything and wait until it takes requests."""
        starting = [("encoder", self._start("encoder", "0")) for _ in range(encoders)]
        starting += [("llm", self._start("llm", "0")) for _ in range(llms)]
        for kind, child in starting:
            self.members[kind][self._serving(child)] = child
        gateway = self._start("gateway", "0")
        self.members["gateway"][self._serving(gateway)] = gateway
        with Client(self.address, timeout=5) as client:
            deadline = time.monotonic() + READY_SECONDS
            while not client.ready():
                assert time.monotonic() < deadline, "the gateway does not become ready"

    def restart(self, kind: str, *addresses: str) -> None:
        """Start processes that have ended at the addresses that they had."""
        started = {address: self._start(kind, address.rpartition(":")[2]) for address in addresses}
        for address, child in started.items():
            self._serving(child)
            self.members[kind][address] = child

    def end_of(self, kind: str, address: str) -> int:
        """Wait for a process that was told to end; its exit code, negative where a signal ended it."""
        self._wait_for(lambda child: child.returncode is not None, self.members[kind][address])
        code = self.members[kind][address].returncode
        assert code is not None
        return code

    def stop(self) -> None:
        """Kill what is left."""
        for child in self._started:
            child.kill()

    def _start(self, kind: str, port: str) -> Child:
        command = [sys.executable, "-m", f"services.{kind}", "--port", port, *self._model]
        if kind == "gateway":
            command += ["--encoder", ",".join(self.members["encoder"]), "--llm", ",".join(self.members["llm"])]
        else:
            command += self._flags
        log = self._log_dir / f"{kind}-{len(self._started)}.log"
        self._started.append(Child(f"{kind}-{len(self._started)}", command, self._events, log, echo=False))
        return self._started[-1]

    def _serving(self, child: Child) -> str:
        self._wait_for(lambda child: child.address is not None or child.returncode is not None, child)
        if child.address is None:
            raise RuntimeError(f"{child.name} {child.ending}: {child.errors()}")
        return child.address

    def _wait_for(self, condition: Callable[[Child], bool], child: Child) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not condition(child):
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=1.0)  # any child's news; the deadline is looked at in between
            assert time.monotonic() < deadline, f"nothing is heard of {child.name}"


@contextlib.contextmanager
def local_fleet(model: str, log_dir: Path, *flags: str, encoders: int = 2, llms: int = 2) -> Iterator[LocalFleet]:
    """Run a fleet around a block of code; ``flags`` are of encoders and language models alike.

    Raises:
        RuntimeError: a process ended before it served.
    """
    fleet = LocalFleet(model, log_dir, flags)
    try:
        fleet.start(encoders, llms)
        yield fleet
    finally:
        fleet.stop()
