"""What one language model answers to all of this gateway's requests, in one call: a message for a step, not for each sequence."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import grpc

from triptych.llm.v1 import llm_pb2

_REST_SECONDS = 5.0  # between the end of one of two calls and what the other has to say


class ResponsesLost(Exception):
    """Responses that were on their way will not come, though nobody says why."""


class Inbox:
    """One request's responses on their way to the one that reads them; iterate, once its call is known to :meth:`watch`.

    Attributes:
        place: where the language model is to send them.
    """

    def __init__(self, place: llm_pb2.ResponseStream) -> None:
        self.place = place
        self._waiting: deque[llm_pb2.GenerateResponse] = deque()
        self._arrived = asyncio.Event()
        self._errors: list[BaseException] = []
        self._call: asyncio.Future[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, call: Any) -> Inbox:
        """The request's own call, which says nothing but how it ended; what it raises is raised here."""
        self._call = asyncio.ensure_future(call.read())
        self._call.add_done_callback(self._call_ended)
        return self

    def put(self, response: llm_pb2.GenerateResponse) -> None:
        """A response has arrived. Where tokens of the same answer still wait for a slow reader, it joins them."""
        if response.HasField("delta"):
            for last in self._waiting:
                if last.HasField("delta") and last.delta.index == response.delta.index:
                    last.delta.token_ids.extend(response.delta.token_ids)
                    return
        self._waiting.append(response)
        self._arrived.set()

    def expire(self) -> None:
        """One of the two calls has ended and does not say all. Leave the other some time, then raise :class:`ResponsesLost`."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REST_SECONDS, self.end, ResponsesLost())

    def end(self, error: BaseException) -> None:
        """Nothing follows."""
        self._errors.append(error)
        self._arrived.set()

    def close(self) -> None:
        """Nobody reads on."""
        if self._call is not None:
            self._call.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> llm_pb2.GenerateResponse:
        while not self._waiting:
            if self._errors:
                raise self._errors.pop(0)
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def _call_ended(self, call: asyncio.Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        if error is not None:
            self.end(error)
        else:
            self.expire()


class SharedResponses:
    """The call that carries them. Not open, it gives no inboxes, and requests are answered in their own calls."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._stream_id = ""  # while open
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = count()
        self._reader: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._without = -1  # the server's life in which it did not have the method

    async def open(self, life: int, seconds: float) -> None:
        """Open the call and wait for an answer, unless it is open, or the server in this ``life`` of it has no such method."""
        if (self._reader is None or self._reader.done()) and life != self._without:
            self._answered.clear()
            self._reader = asyncio.create_task(self._read(life))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._answered.wait()

    async def close(self) -> None:
        """End it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    @contextlib.contextmanager
    def inbox(self) -> Iterator[Inbox | None]:
        """A place for the responses to one request."""
        if not self._stream_id:
            yield None
            return
        place = llm_pb2.ResponseStream(stream_id=self._stream_id, number=next(self._numbers))
        self._inboxes[place.number] = inbox = Inbox(place)
        try:
            yield inbox
        finally:
            del self._inboxes[place.number]
            inbox.close()

    async def _read(self, life: int) -> None:
        stream_id = uuid.uuid4().hex
        call = self._stub.StreamResponses(llm_pb2.StreamResponsesRequest(stream_id=stream_id))
        try:
            async for batch in call:
                if not self._stream_id:
                    self._stream_id = stream_id
                    self._answered.set()
                for numbered in batch.responses:
                    if (inbox := self._inboxes.get(numbered.number)) is not None:
                        inbox.put(numbered.response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._without = life
        finally:
            self._stream_id = ""
            self._answered.set()
            call.cancel()
            for inbox in self._inboxes.values():
                inbox.expire()
