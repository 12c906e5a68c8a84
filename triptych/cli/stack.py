"""The local stack's life: start, watch, drain. It knows processes and their order, not their flags."""

import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from triptych.cli.child import Child, Event

_GRACE = 60.0
_DRAIN_ORDER = ("gateway", "llm", "encoder")


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class ChildEnded(Exception):
    """A service ended without being asked to."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} {child.ending}")
        self.child = child


class Stack:
    """Service processes and what they report. SIGINT and SIGTERM become events from its making on."""

    def __init__(self, log_dir: Path | None, *, verbose: bool) -> None:
        self._log_dir = log_dir
        self._verbose = verbose
        self._children: dict[str, list[Child]] = {kind: [] for kind in _DRAIN_ORDER}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        threading.Thread(target=_forward_signals, args=(_watch_signals(), self._events), daemon=True).start()

    def start(self, kind: str, count: int, *flags: str) -> list[Child]:
        """Starts `count` processes of `python -m services.<kind>`; does not wait for them."""
        for index in range(count):
            name = kind if count == 1 else f"{kind}-{index}"
            say(f"starting {name} ...")
            log = self._log_dir / f"{name}.log" if self._log_dir else None
            command = [sys.executable, "-m", f"services.{kind}", *flags]
            self._children[kind].append(Child(name, command, self._events, log, echo=self._verbose))
        return self._children[kind]

    def wait(self, done: Callable[[], bool], *, poll: float | None = None) -> None:
        """Waits until `done`, asking again after every event and every `poll` seconds.

        Raises:
            Interrupted: a signal arrived.
            ChildEnded: a process ended.
        """
        while not done():
            try:
                event = self._events.get(timeout=poll)
            except queue.Empty:
                continue
            if isinstance(event, signal.Signals):
                raise Interrupted(event)
            if event.returncode is not None:
                raise ChildEnded(event)
            say(f"{event.name} ready at {event.address} ({event.seconds:.1f} s)")

    def drain(self) -> bool:
        """Stops gateway, language models and encoders, in this order; whether all exited with 0.

        A signal meanwhile, or a minute without an end, kills what is left.
        """
        for kind in _DRAIN_ORDER:
            wave = self._children[kind]
            for child in wave:
                child.terminate()
            deadline = time.monotonic() + _GRACE
            while any(child.returncode is None for child in wave):
                try:
                    event: Event | None = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    event = None
                if event is None or isinstance(event, signal.Signals):
                    say("killing what is left")
                    self.kill()
                    deadline = time.monotonic() + _GRACE
        ended = [child for children in self._children.values() for child in children]
        for child in ended:
            if child.returncode:
                say(f"{child.name} {child.ending}")
        return not any(child.returncode for child in ended)

    def kill(self) -> None:
        """Kills every process that is left."""
        for children in self._children.values():
            for child in children:
                child.kill()


def _watch_signals() -> socket.socket:
    """A socket that yields a byte for each signal.

    A handler would not do: the main thread runs it, and can miss a signal that arrives just before it starts to wait.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: None)
    return reader


def _forward_signals(reader: socket.socket, events: "queue.SimpleQueue[Event]") -> None:
    while numbers := reader.recv(16):
        for number in numbers:
            events.put(signal.Signals(number))


def say(text: str) -> None:
    """Tells the operator, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
