"""Streams that carry the responses to many requests: what sixteen sequences of a step have to say is one message, not sixteen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc

from services.common.errors import ServiceError, invalid, unavailable
from triptych.llm.v1 import llm_pb2

_BATCH = 256  # responses in a message
_QUEUED = 4096  # responses that wait for a reader who is slow; then requests wait


class ResponseStreams:
    """All that are open."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[llm_pb2.NumberedResponse]] = {}

    async def read(self, stream_id: str) -> AsyncGenerator[llm_pb2.ResponseBatch, None]:
        """Open a stream and yield what is put into it: at first nothing, which says that it is open.

        Raises:
            ServiceError: INVALID_ARGUMENT: the name is empty or too long. ALREADY_EXISTS: it is in use.
        """
        if not 1 <= len(stream_id) <= 128:
            raise invalid("stream_id", f"must have 1 to 128 characters, got {len(stream_id)}")
        if stream_id in self._open:
            raise ServiceError(grpc.StatusCode.ALREADY_EXISTS, "stream_id: a stream of this name is open; use a new name")
        queue: asyncio.Queue[llm_pb2.NumberedResponse] = asyncio.Queue(_QUEUED)
        self._open[stream_id] = queue
        try:
            yield llm_pb2.ResponseBatch()
            while True:
                batch = [await queue.get()]
                while len(batch) < _BATCH and not queue.empty():
                    batch.append(queue.get_nowait())
                yield llm_pb2.ResponseBatch(responses=batch)
        finally:
            del self._open[stream_id]
            while not queue.empty():  # those who wait to put something there learn that it is closed
                queue.get_nowait()

    def check(self, request: llm_pb2.GenerateRequest) -> None:
        """Refuse a request whose responses have no stream to go to, or do not belong there.

        Raises:
            ServiceError: INVALID_ARGUMENT or UNAVAILABLE.
        """
        if not request.HasField("response_stream"):
            return
        sampling = request.sampling
        if sampling.include_first_logits or sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
            raise invalid("response_stream", "carries tokens alone; leave it out where logits or log probabilities are asked for")
        if request.response_stream.stream_id not in self._open:
            raise _closed()

    async def put(self, where: llm_pb2.ResponseStream, response: llm_pb2.GenerateResponse) -> None:
        """Send a response, once there is room.

        Raises:
            ServiceError: UNAVAILABLE: the stream has ended.
        """
        if (queue := self._open.get(where.stream_id)) is None:
            raise _closed()
        await queue.put(llm_pb2.NumberedResponse(number=where.number, response=response))


def _closed() -> ServiceError:
    return unavailable("response_stream: no stream of this name is open; open it with StreamResponses and send the request again")
