"""The engine: one thread that schedules, runs and postprocesses steps, and the hand-over between it and the event loop.

Everything that touches sequences, blocks or tensors happens in the engine's thread; others post commands. What a step
yields is delivered to the event loop in one call per step.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from services.llm.config import Pruning
from services.llm.events import Accepted, EngineFailure, Event, Finished, PromptScores, Refused, Stream, Token
from services.llm.logprobs import Choice, prompt_logprobs
from services.llm.merge import MediaRun
from services.llm.model_runner import ModelRunner, StepOutput
from services.llm.pruning import dropping
from services.llm.request import GenerateArguments
from services.llm.sampler import NOT_NUMBERS, TokenChooser, choose
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Finish, RowSpan, Sequence
from services.llm.step_pace import StepPace

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Answer:
    """One of a request's answers."""

    request: Request
    index: int
    sequence: Sequence
    chooser: TokenChooser
    first_token: float | None = None


@dataclass(eq=False)
class Request:
    """What was asked, and what the engine knows of it besides tokens; ``events`` is read by the event loop."""

    arguments: GenerateArguments
    events: Stream = field(default_factory=Stream)
    submitted: float = field(default_factory=time.monotonic)
    rows_complete: float | None = None
    prefill_started: float | None = None
    prompt_scores: list[Choice] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # the unfinished ones
    arrived: list[list[int]] = field(default_factory=list)  # rows that are here, by item and feature


class Engine:
    """Runs requests until they finish or are aborted.

    Attributes:
        steps: steps since the start.
        largest_batch: most sequences in one step.
        generated: tokens of answers since the start.
        step_started: when the step that is running began, on the monotonic clock; None between steps.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, decode_stretch: float = 0.0) -> None:
        self.runner, self.scheduler, self._pace = runner, scheduler, StepPace(decode_stretch)
        self.steps = self.largest_batch = self.generated = 0
        self.step_started: float | None = None
        self._answers: dict[str, Answer] = {}  # by sequence id
        self._scored: set[str] = set()  # sequences whose prompt's logits are wanted
        self._names = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[Request, Event]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, died: Callable[[], None] = lambda: None) -> None:
        """Start the thread; events are delivered on ``loop``. ``died`` is called in the thread if a bug ends it."""
        self._loop, self._died = loop, died
        self._thread.start()

    def stop(self, seconds: float | None = None) -> bool:
        """End the thread after the current step; False if that takes more than ``seconds``."""
        self._commands.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Start a request. Safe from any thread, like every method below."""
        self._commands.put(lambda: self._add(request))

    def write_rows(self, request: Request, item: int, feature: int, rows: torch.Tensor) -> None:
        """The next rows ``[count, hidden]`` of an item's feature have arrived; a row is ready when all features have it."""
        self._commands.put(lambda: self._write_rows(request, item, feature, rows))

    def keep_rows(self, request: Request, item: int, kept: torch.Tensor) -> None:
        """Which rows of an item are left, where some were dropped; comes before they do."""
        self._commands.put(lambda: self._keep_rows(request, item, kept))

    def abort(self, request: Request) -> None:
        """End a request, whatever its state; nothing is delivered for it afterwards. May be repeated."""
        self._commands.put(lambda: self._remove(request))

    def resume(self, request: Request) -> None:
        """The reader of a full stream has caught up."""
        self._commands.put(lambda: self._set_paused(request, False))

    def step(self) -> bool:
        """Schedule, run, postprocess. False if there was nothing to compute."""
        chunks = self.scheduler.schedule(self._pace.prompt_tokens)
        if not chunks:
            return False
        decodes = sum(c.sequence.decoding for c in chunks)
        prompt_tokens = sum(c.count for c in chunks) - decodes
        self.step_started = time.monotonic()
        self.runner.prepare(self.scheduler.kv.take_copies(), self.scheduler.kv.take_stale())
        self._compute(chunks)
        self._pace.note(decodes, prompt_tokens, time.monotonic() - self.step_started)
        self.steps += 1
        self.largest_batch = max(self.largest_batch, len(chunks))
        self.step_started = None
        return True

    def _compute(self, chunks: list[Chunk]) -> None:
        """Run and postprocess; what fails together is computed again one by one, so that only what fails alone ends."""
        try:
            output = self.runner.run(chunks, self._scored)
        except Exception:
            logger.exception("step failed", extra=_of(self._answers[c.sequence.id] for c in chunks))
            if len(chunks) == 1:
                text = "the step that computed this request failed; the log has the details"
                self._fail(chunks[0].sequence, EngineFailure(text))
                return
            for chunk in chunks:
                if chunk.sequence.id in self._answers:  # not ended with a sibling
                    self._compute([chunk])
        else:
            self._postprocess(chunks, output)

    def _postprocess(self, chunks: list[Chunk], output: StepOutput) -> None:
        """Take note of what was computed, then choose a token for every sequence that has its logits."""
        for chunk in output.broken:
            self._fail(chunk.sequence, EngineFailure(NOT_NUMBERS))
        self.scheduler.commit(chunks)
        if output.scored or len(output.sampling) < len(chunks):
            self._note_prefills(chunks, output)
        answers: list[Answer] = []
        rows: list[int] = []
        for row, chunk in enumerate(output.sampling):
            if (answer := self._answers.get(chunk.sequence.id)) is not None:  # not failed by a broken sibling
                forked = self._fork(chunk.sequence) if chunk.sequence.n > 1 else [answer]
                answers += forked
                rows += [row] * len(forked)
        logits = output.logits if rows == list(range(len(output.sampling))) else output.logits[rows]
        choices = _choose(answers, logits)
        now = time.monotonic()
        self.generated += len(choices)
        for row, (answer, choice) in enumerate(zip(answers, choices, strict=True)):
            if choice is None:
                assert answer.chooser.failure is not None
                self._fail(answer.sequence, answer.chooser.failure)
            elif answer.sequence.id in self._answers:  # not failed by a sibling
                self._take(answer, choice, now, logits[row])

    def _take(self, answer: Answer, choice: Choice, now: float, logits: torch.Tensor) -> None:
        request, sequence = answer.request, answer.sequence
        sequence.append(choice.token)
        token = Token(answer.index, choice)
        if answer.first_token is None:
            answer.first_token = now
            request.prefill_started = request.prefill_started or self.step_started
            if request.arguments.include_first_logits:
                token = Token(answer.index, choice, logits[None].cpu())
        self._send(request, token)
        if sequence.finish:
            self._finish(answer, sequence.finish, now)
        else:
            answer.chooser.accept(choice.token)
            if request.events.full:
                self._set_paused(request, True)

    def _fork(self, sequence: Sequence) -> list[Answer]:
        """A sequence that stands for several answers becomes as many; they share the prompt's blocks."""
        first = self._answers[sequence.id]
        names = [self._name() for _ in range(sequence.n - 1)]
        for index, child in enumerate(self.scheduler.fork(sequence, names), start=1):
            self.runner.share(sequence.id, child.id)
            answer = Answer(first.request, index, child, first.chooser.fork(index))
            self._answers[child.id] = answer
            first.request.answers.append(answer)
        return list(first.request.answers)

    def _note_prefills(self, chunks: list[Chunk], output: StepOutput) -> None:
        for chunk in chunks:
            answer = self._answers.get(chunk.sequence.id)
            if answer is None:
                continue
            request = answer.request
            request.prefill_started = request.prefill_started or self.step_started
            if (logits := output.scored.get(chunk.sequence.id)) is not None:
                self._score_prompt(request, chunk, logits)

    def _score_prompt(self, request: Request, chunk: Chunk, logits: torch.Tensor) -> None:
        """Log probabilities of the prompt tokens behind those of a chunk; the last chunk sends all."""
        prompt, top = request.arguments.prompt, request.arguments.prompt_logprobs
        assert top is not None
        known = len(request.prompt_scores)  # a preempted sequence computes its prompt again, cut into other chunks
        following = prompt[known + 1 : chunk.start + chunk.count + 1]
        if following:
            request.prompt_scores += prompt_logprobs(logits[known - chunk.start :][: len(following)], following, top)
        if chunk.start + chunk.count >= len(prompt):
            self._scored.discard(chunk.sequence.id)
            self._send(request, PromptScores(request.prompt_scores))

    def _finish(self, answer: Answer, reason: Finish, now: float) -> None:
        request, sequence = answer.request, answer.sequence
        first = answer.first_token or now
        waited = None if request.rows_complete is None else request.rows_complete - request.submitted
        last = len(request.answers) == 1
        self._send(
            request,
            Finished(
                answer.index, last, reason, len(sequence.output), max(0, sequence.cached), waited,
                first - (request.prefill_started or first), now - first,
            ),
        )  # fmt: skip
        self._drop(answer)

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
        arguments = request.arguments
        name = self._name()
        try:
            atoms = self.runner.add(name, arguments.prompt, arguments.media)
        except Exception:
            logger.exception("merge failed", extra={"fields": {"requests": [arguments.id]}})
            text = "the prompt could not be merged with its media; the log has the details"
            self._send(request, EngineFailure(text))
            return
        sequence = _sequence(name, arguments, list(atoms), self.runner.merger.family.cross, self.runner.pruning)
        if refusal := self.scheduler.refusal(sequence):
            self.runner.remove(name)
            self._send(request, Refused("token_ids", refusal))
            return
        grammar = arguments.grammar.start() if arguments.grammar else None
        words = [token for token in arguments.prompt if token < self.runner.vocab_size]  # a placeholder may have no logit
        chooser = TokenChooser(arguments.sampling, words, arguments.end_token_ids, arguments.min_tokens, grammar)
        for token in arguments.answer:
            chooser.accept(token)
        answer = Answer(request, 0, sequence, chooser)
        self._answers[name] = answer
        request.answers.append(answer)
        request.arrived = [[0] * self.runner.merger.features for _ in arguments.media]
        if arguments.prompt_logprobs is not None:
            self._scored.add(name)
        self.scheduler.add(sequence)
        self._send(request, Accepted())

    def _write_rows(self, request: Request, item: int, feature: int, rows: torch.Tensor) -> None:
        if not request.answers:
            return
        sequence = request.answers[0].sequence
        arrived = request.arrived[item]
        if not bool(torch.isfinite(rows).all()):
            self._fail(sequence, EngineFailure("the encoder's rows are not numbers; try another dtype"))
            return
        self.runner.write_rows(sequence.id, item, request.arguments.media[item], arrived[feature], feature, rows)
        arrived[feature] += len(rows)
        sequence.spans[item].arrived = min(arrived)
        if all(s.arrived == s.rows for s in sequence.spans):
            request.rows_complete = time.monotonic()

    def _keep_rows(self, request: Request, item: int, kept: torch.Tensor) -> None:
        if request.answers:
            self.runner.keep_rows(request.answers[0].sequence.id, item, request.arguments.media[item], kept)

    def _remove(self, request: Request, poisoned: bool = False) -> None:
        for answer in list(request.answers):
            self._drop(answer, poisoned)

    def _drop(self, answer: Answer, poisoned: bool = False) -> None:
        answer.request.answers.remove(answer)
        del self._answers[answer.sequence.id]
        self._scored.discard(answer.sequence.id)
        self.scheduler.finish(answer.sequence, poisoned)
        self.runner.remove(answer.sequence.id)

    def _fail(self, sequence: Sequence, failure: EngineFailure | Refused) -> None:
        """End the whole request of a sequence."""
        if (answer := self._answers.get(sequence.id)) is not None:
            self._send(answer.request, failure)
            self._remove(answer.request, poisoned=True)

    def _set_paused(self, request: Request, paused: bool) -> None:
        request.events.lagged = paused
        for answer in request.answers:
            answer.sequence.paused = paused

    def _name(self) -> str:
        return str(next(self._names))

    def _send(self, request: Request, event: Event) -> None:
        request.events.sent += 1
        self._outbox.append((request, event))

    def _deliver(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_put_all, batch)


def _choose(answers: list[Answer], logits: torch.Tensor) -> list[Choice | None]:
    """A choice for every row; where choosing goes wrong it does for one row only."""
    try:
        return choose([answer.chooser for answer in answers], logits)
    except Exception:
        if len(answers) > 1:
            return [_choose([answer], logits[i : i + 1])[0] for i, answer in enumerate(answers)]
        logger.exception("sampling failed", extra=_of(answers))
        answers[0].chooser.failure = EngineFailure("no token could be chosen for this request; the log has the details")
        return [None]


def _of(answers: Iterable[Answer]) -> dict[str, object]:
    """What names the requests of answers in a log line; the engine's thread serves many and has no request id of its own."""
    return {"fields": {"requests": sorted({answer.request.arguments.id for answer in answers})}}


def _put_all(batch: list[tuple[Request, Event]]) -> None:
    for request, event in batch:
        request.events.put(event)


def _sequence(
    name: str, arguments: GenerateArguments, atoms: list[tuple[int, int]], cross: bool, pruning: Pruning | None
) -> Sequence:
    """The sequence that a request starts with."""
    media = list(zip(arguments.media, arguments.digests, strict=True))
    spans = [RowSpan(run.offset, run.rows, 0, _identity(run, digest), run.stop - run.offset) for run, digest in media]
    salt = arguments.salt
    if cross:  # tokens before a picture see it too
        salt = b"".join([len(salt).to_bytes(4), salt, *(span.digest for span in spans)])
    dropped, drop_from = dropping(arguments.media, pruning.share(arguments.visual_token_keep)) if pruning else (0, 0)
    return Sequence(
        name, arguments.prompt, arguments.max_tokens, arguments.end_token_ids, arguments.min_tokens, arguments.priority,
        arguments.n, spans, atoms, salt, sum(run.rows for run in arguments.media) if cross else 0,
        dropped, drop_from,
        cacheable=arguments.prompt_logprobs is None and not (cross and not all(span.digest for span in spans)),
        output=list(arguments.answer),  # as if it had been computed here and preempted
    )  # fmt: skip


def _identity(run: MediaRun, digest: bytes) -> bytes:
    """Names all that an item's keys and values depend on, or b"" if the caller did not say what its content is."""
    if not digest:
        return b""
    shape = (run.modality, run.rows, run.grid.t, run.grid.h, run.grid.w, run.seconds_per_grid, run.whole_rows, run.first_row)
    return hashlib.blake2b(digest + repr(shape).encode(), digest_size=32).digest()
