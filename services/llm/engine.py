"""The engine: one thread that schedules, runs and postprocesses steps, and the hand-over between it and the event loop.

Everything that touches sequences, blocks or tensors happens in the engine's thread; others post commands. What a step
yields is delivered to the event loop in one call per step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from services.llm.merge import MediaRun
from services.llm.model_runner import ModelRunner
from services.llm.sampler import NanLogits, Sampling, TokenChooser
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Finish, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """One generated token; ``logits`` ``[1, vocab]`` on the first where they were asked for."""

    id: int
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Finished:
    """The answer is complete. Times are seconds; None where the stage never happened."""

    reason: Finish
    completion_tokens: int
    wait_for_rows: float | None
    prefill: float
    decode: float


class EngineFailure(Exception):
    """The step that held this sequence failed, or its logits were not numbers. The text is for the client."""


class Aborted(Exception):
    """Somebody else ended the request."""


Event = Token | Finished | EngineFailure | Aborted


@dataclass
class Request:
    """A sequence with what the engine needs besides tokens; ``events`` is read by the event loop."""

    sequence: Sequence
    media: list[MediaRun]
    sampling: Sampling
    include_first_logits: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    submitted: float = field(default_factory=time.monotonic)
    rows_complete: float | None = None
    prefill_started: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.chooser = TokenChooser(self.sampling, self.sequence.end_token_ids, self.sequence.min_tokens)


class Engine:
    """Runs sequences until they finish or are aborted.

    Attributes:
        steps: steps since the start.
        largest_batch: most sequences in one step.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self.steps = self.largest_batch = 0
        self._requests: dict[str, Request] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[Request, Event]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, died: Callable[[], None] = lambda: None) -> None:
        """Start the thread; events are delivered on ``loop``. ``died`` is called in the thread if a bug ends it."""
        self._loop, self._died = loop, died
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step."""
        self._commands.put(None)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Start a sequence. Safe from any thread, like every method below."""
        self._commands.put(lambda: self._add(request))

    def write_rows(self, request: Request, span: int, rows: torch.Tensor) -> None:
        """The next rows ``[count, hidden]`` of a span have arrived."""
        self._commands.put(lambda: self._write_rows(request, span, rows))

    def abort(self, request: Request) -> None:
        """End a sequence, whatever its state; nothing is delivered for it afterwards. May be repeated."""
        self._commands.put(lambda: self._remove(request))

    def step(self) -> bool:
        """Schedule, run, postprocess. False if there was nothing to compute."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        self._mark_prefill(chunks)
        if stale := self.scheduler.take_stale():
            self.runner.clear_blocks(stale)
        try:
            sampling, logits = self.runner.run(chunks)
        except Exception:
            logger.exception("step failed")
            for chunk in chunks:
                self._fail(chunk.sequence, "the step that computed this request failed; the log has the details")
            return True
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        for chunk, row in zip(sampling, logits, strict=True):
            self._take_token(chunk.sequence, row)
        self.steps += 1
        self.largest_batch = max(self.largest_batch, len(chunks))
        return True

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception:
            logger.critical("the engine died", exc_info=True)
            self._died()

    def _step_until_stopped(self) -> None:
        busy = False
        while True:
            if not self._drain_commands(wait=not busy):
                return
            busy = self.step()
            self._deliver()

    def _drain_commands(self, wait: bool) -> bool:
        """Carry out what was posted; False when the engine is to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, request: Request) -> None:
        sequence = request.sequence
        try:
            self.runner.add(sequence.id, sequence.prompt, request.media)
        except Exception:
            logger.exception("merge failed")
            self._outbox.append(
                (request, EngineFailure("the prompt could not be merged with its media; the log has the details"))
            )
            return
        self._requests[sequence.id] = request
        self.scheduler.add(sequence)

    def _write_rows(self, request: Request, span: int, rows: torch.Tensor) -> None:
        sequence = request.sequence
        if sequence.id not in self._requests:
            return
        place = sequence.spans[span]
        self.runner.write_rows(sequence.id, place.offset + place.arrived, rows)
        place.arrived += len(rows)
        if all(s.arrived == s.rows for s in sequence.spans):
            request.rows_complete = time.monotonic()

    def _remove(self, request: Request) -> None:
        sequence = request.sequence
        if self._requests.get(sequence.id) is request:
            del self._requests[sequence.id]
            self.scheduler.finish(sequence)
            self.runner.remove(sequence.id)

    def _mark_prefill(self, chunks: list[Chunk]) -> None:
        now = time.monotonic()
        for chunk in chunks:
            request = self._requests[chunk.sequence.id]
            if request.prefill_started is None:
                request.prefill_started = now

    def _take_token(self, sequence: Sequence, logits: torch.Tensor) -> None:
        request = self._requests[sequence.id]
        try:
            token = request.chooser.choose(logits, len(sequence.output))
        except NanLogits:
            self._fail(sequence, "the model computed values that are not numbers for this request; try another dtype")
            return
        except Exception:
            logger.exception("sampling failed")
            self._fail(sequence, "no token could be chosen for this request; the log has the details")
            return
        first = not sequence.output
        sequence.append(token)
        now = time.monotonic()
        if first:
            request.first_token = now
        self._outbox.append((request, Token(token, logits[None].cpu() if first and request.include_first_logits else None)))
        if sequence.finish:
            self._outbox.append((request, self._finished(request, sequence.finish, now)))
            self._remove(request)

    @staticmethod
    def _finished(request: Request, reason: Finish, now: float) -> Finished:
        first = request.first_token or now
        waited = None if request.rows_complete is None else request.rows_complete - request.submitted
        return Finished(reason, len(request.sequence.output), waited, first - (request.prefill_started or first), now - first)

    def _fail(self, sequence: Sequence, text: str) -> None:
        request = self._requests[sequence.id]
        self._outbox.append((request, EngineFailure(text)))
        self._remove(request)

    def _deliver(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[Request, Event]]) -> None:
    for request, event in batch:
        request.events.put_nowait(event)
