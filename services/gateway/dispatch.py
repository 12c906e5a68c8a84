"""One request at the backends: where it goes, and where it goes on when one of them is lost."""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property

import grpc

from services.common import logs
from services.common.errors import ServiceError
from services.gateway import metrics
from services.gateway.admission import Ledger, Pool, Reservation
from services.gateway.answers import Answers, Delta, Ended
from services.gateway.backends import Backends
from services.gateway.background import Background
from services.gateway.budgets import Prefer
from services.gateway.peers import BackendLost, MediaLost
from services.gateway.prompt import Prompt
from services.gateway.suspects import Suspects
from services.gateway.uploads import Uploads
from triptych.common.v1 import media_pb2

logger = logging.getLogger(__name__)
MAX_FAILOVERS = 2  # times that a request goes on elsewhere when a server that it is at is lost


@dataclass
class Call:
    """One request on its way through the backends.

    Attributes:
        lost: language models that went away from under it.
    """

    request_id: str
    deadline: float
    prompt: Prompt
    max_tokens: int
    answers: Answers
    lost: set[str] = field(default_factory=set)

    @cached_property
    def fingerprint(self) -> bytes:
        """Names the prompt and its media."""
        tokens = array("I", self.prompt.token_ids).tobytes()
        return hashlib.sha256(b"".join((tokens, *(item.digest for item in self.prompt.items)))).digest()

    @property
    def seconds_left(self) -> float:
        """What the next hop may take."""
        return max(0.0, self.deadline - time.monotonic())


class Dispatcher:
    """Takes requests to backends, once they are let in."""

    def __init__(self, backends: Backends, ledger: Ledger, background: Background) -> None:
        self._backends, self._ledger, self._background = backends, ledger, background
        self._suspects = Suspects()

    def check(self, call: Call) -> None:
        """Refuse a request that seems to kill language models.

        Raises:
            ServiceError: INTERNAL: it does.
        """
        if self._suspects.suspect(call.fingerprint, time.monotonic()):
            text = "language models died while they ran this request; it is not run again for a while: look at their logs"
            raise ServiceError(grpc.StatusCode.INTERNAL, text, reason="REQUEST_SUSPECT")

    def preference(self, call: Call) -> Prefer:
        """Pools in the order in which the prompt is best taken there."""

        def ordered(pools: Sequence[Pool]) -> list[Pool]:
            by_name = {pool.name: pool for pool in pools}
            return [by_name[name] for name in self._backends.llms_for(call.prompt) if name in by_name]

        return ordered

    async def answer(self, call: Call, held: Reservation) -> AsyncGenerator[Delta | Ended, None]:
        """Stream all answers to their end, beginning at the language model that ``held`` names; giving media back goes on behind.

        Raises:
            ServiceError: what a backend raised, or that one was lost and nobody can do what it had to do.
        """
        uploads = Uploads(self._backends, call.prompt.items, call.request_id, lambda: call.seconds_left)
        try:
            async with aclosing(self._generate(call, held, uploads)) as events:
                async for event in events:
                    yield event
        finally:
            if call.prompt.items:
                self._background.start(uploads.drop())
        self._suspects.clear(call.fingerprint)

    async def _generate(self, call: Call, held: Reservation, uploads: Uploads) -> AsyncGenerator[Delta | Ended, None]:
        failovers = 0
        while not call.answers.over:
            refs = await uploads.refs()
            lost: BackendLost | MediaLost | None = None
            try:
                async with aclosing(self._stream(call, held.pool.name, refs, failovers, uploads)) as events:
                    async for event in events:
                        yield event
            except (BackendLost, MediaLost) as error:
                lost = error
                if isinstance(lost, BackendLost) and lost.death is not None:
                    self._suspects.note(call.fingerprint, lost.death, time.monotonic())
                for event in call.answers.settle():
                    yield event
            if lost is not None and not call.answers.over:
                failovers += 1
                if failovers > MAX_FAILOVERS or not call.answers.resumable:
                    raise lost
                self._go_on(call, held, uploads, lost)

    async def _stream(
        self, call: Call, llm: str, refs: list[media_pb2.EmbeddingRef], failovers: int, uploads: Uploads
    ) -> AsyncGenerator[Delta | Ended, None]:
        """One call to a language model, to the end of the last answer."""
        server = self._backends.llm(llm)
        self._backends.note_sent(call.prompt, server)
        request_id = f"{call.request_id[:120]}/{failovers}" if failovers else call.request_id  # one that is lost may still run
        stream = server.generate(call.prompt, call.max_tokens, refs, request_id, call.seconds_left, call.answers.tokens)
        async with aclosing(stream) as responses:
            async for response in responses:
                for event in call.answers.take(response):
                    uploads.arrived()
                    yield event
                if call.answers.over:
                    return
        raise ServiceError(grpc.StatusCode.INTERNAL, "the language model ended its answer too early; its log has the details")

    def _go_on(self, call: Call, held: Reservation, uploads: Uploads, lost: BackendLost | MediaLost) -> None:
        """Prepare for another try.

        Raises:
            BackendLost: there is no other language model.
            ServiceError: INTERNAL: the request seems to kill them.
        """
        fields = {"answer_tokens": call.answers.completion_tokens}
        if isinstance(lost, MediaLost):
            uploads.lose(lost.encoder)
            if lost.gone:
                self._backends.lost(lost.encoder)
            logs.event(logger, "encoder lost, media are encoded again", logging.WARNING, encoder=lost.encoder, **fields)
            return
        call.lost.add(held.pool.name)
        self.check(call)
        known = {pool.name for pool in self._ledger.open_pools}
        if not (others := [name for name in self._backends.llms_for(call.prompt, call.lost) if name in known]):
            raise lost
        logs.event(
            logger, "language model lost, another goes on", logging.WARNING, lost=held.pool.name, other=others[0], **fields
        )
        metrics.failovers.labels("llm").inc()
        self._ledger.move(held, others[0])
