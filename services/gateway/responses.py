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

_REST_SECONDS = 10.0  # between the end of a request's own call and its last response


class Inbox:
    """One request's responses on their way to the one that reads them; iterate, once its call is known to :meth:`watch`.

    Attributes:
        place: where the language model is to send them.
    """

    def __init__(self, place: llm_pb2.ResponseStream) -> None:
        self.place = place
        self._waiting: deque[llm_pb2.GenerateResponse] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._call: asyncio.Future[Any] | None = None

    def watch(self, call: Any) -> Inbox:
        """The request's own call, which says nothing but how it ended; what it raises is raised here."""
        self._call = asyncio.ensure_future(call.read())
        self._call.add_done_callback(self._call_ended)
        return self

    def put(self, response: llm_pb2.GenerateResponse) -> None:
        """A response has arrived. Where the last one still waits for a slow reader, its tokens join that one's."""
        last = self._waiting[-1] if self._waiting else response
        both = last is not response and last.HasField("delta") and response.HasField("delta")
        if both and last.delta.index == response.delta.index:
            last.delta.token_ids.extend(response.delta.token_ids)
        else:
            self._waiting.append(response)
        self._arrived.set()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows."""
        if not self._ended:
            self._ended, self._error = True, error
            self._arrived.set()

    def close(self) -> None:
        """Nobody reads on."""
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> llm_pb2.GenerateResponse:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def _call_ended(self, call: asyncio.Future[Any]) -> None:
        if call.cancelled():
            return
        if (error := call.exception()) is not None:
            self.end(error)
        else:  # what was said may still be on its way in the other call
            asyncio.get_running_loop().call_later(_REST_SECONDS, self.end)


class SharedResponses:
    """The call that carries them. Not open, it gives no inboxes, and requests are answered in their own calls."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._stream_id = ""  # while open
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = count()
        self._reader: asyncio.Task[None] | None = None
        self._life, self._opened = -1, False
        self._answered = asyncio.Event()

    async def open(self, life: int, seconds: float) -> None:
        """Open the call, unless it is open, or was refused by the server in this ``life`` of it; wait so long for an answer."""
        if (self._reader is None or self._reader.done()) and (self._opened or life != self._life):
            self._life, self._opened = life, False
            self._answered.clear()
            self._reader = asyncio.create_task(self._read())
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

    async def _read(self) -> None:
        stream_id, error = uuid.uuid4().hex, None
        call = self._stub.StreamResponses(llm_pb2.StreamResponsesRequest(stream_id=stream_id))
        try:
            async for batch in call:
                if not self._opened:
                    self._stream_id, self._opened = stream_id, True
                    self._answered.set()
                for numbered in batch.responses:
                    if (inbox := self._inboxes.get(numbered.number)) is not None:
                        inbox.put(numbered.response)
        except grpc.aio.AioRpcError as broken:
            error = broken
        finally:
            self._stream_id = ""
            self._answered.set()
            call.cancel()
            for inbox in self._inboxes.values():
                inbox.end(error)
