"""The encoders and language models behind the gateway: one channel each, what they last said of themselves, and their calls.

The only place that speaks their protocols. Their errors come out as :class:`ServiceError`, with the details they sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import logs
from services.common.channel import open_channel, outgoing_metadata
from services.common.errors import ServiceError, unavailable
from services.gateway.prompt import Item, Prompt
from services.gateway.wire import encode_to_proto, sampling_to_proto, spans_to_proto
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

logger = logging.getLogger(__name__)
POLL_TIMEOUT = 2.0  # seconds
B = TypeVar("B", bound="Backend")


@contextmanager
def errors_of(peer: str) -> Iterator[None]:
    """Turn a failed call's error into ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = ServiceError.from_rpc(error, peer)
        if failure.reason == "REF_NOT_FOUND":  # an encoder that restarted; the client has never heard of refs
            failure = unavailable("the encoder lost the request's media, as after a restart; try again")
        raise failure from error


class Backend:
    """One server.

    Attributes:
        address: host:port as dialled.
        ready: whether it answered the last poll, serves, and holds the same checkpoint.
        active: requests of this gateway that use it.
        served: requests of this gateway that it was chosen for.
    """

    service: str
    peer: str

    def __init__(self, address: str, fingerprint: str) -> None:
        self.address, self._fingerprint = address, fingerprint
        self.ready = False
        self.active = self.served = 0
        self._channel = open_channel(address)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def refresh(self) -> None:
        """Ask for health and load; never raises for a server that is away."""
        try:
            request = health_pb2.HealthCheckRequest(service=self.service)
            status = (await self._health.Check(request, timeout=POLL_TIMEOUT)).status
            ready = status == health_pb2.HealthCheckResponse.SERVING and self._matches(await self._load())
        except grpc.aio.AioRpcError:
            ready = False
        if ready != self.ready:
            logs.event(logger, f"{self.peer} {'ready' if ready else 'not ready'}", address=self.address)
        self.ready = ready

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _load(self) -> str:
        """Poll the load; returns the fingerprint of the checkpoint."""
        raise NotImplementedError

    def _matches(self, fingerprint: str) -> bool:
        if fingerprint in ("", self._fingerprint):
            return True
        names = {"address": self.address, "its": fingerprint, "ours": self._fingerprint}
        logs.event(logger, f"{self.peer} holds another checkpoint", logging.ERROR, **names)
        return False


class Encoder(Backend):
    """One encoder.

    Attributes:
        load: what it last published.
    """

    service, peer = "triptych.encoder.v1.EncoderService", "encoder"

    def __init__(self, address: str, fingerprint: str) -> None:
        super().__init__(address, fingerprint)
        self.load = encoder_pb2.GetLoadResponse()
        self._stub: Any = encoder_pb2_grpc.EncoderServiceStub(self._channel)

    async def encode(self, item: Item, request_id: str, timeout: float) -> str:
        """Hand over one item; returns the id of its rows' ref."""
        request = encode_to_proto(item, request_id)
        with errors_of(self.peer):
            return str((await self._stub.Encode(request, timeout=timeout, metadata=outgoing_metadata())).ref_id)

    async def release(self, refs: Sequence[str], timeout: float) -> None:
        """Drop refs; a failure is only logged, because an encoder that is away holds nothing."""
        try:
            await self._stub.Release(encoder_pb2.ReleaseRequest(ref_ids=refs), timeout=timeout, metadata=outgoing_metadata())
        except grpc.aio.AioRpcError as error:
            logs.event(logger, "release failed", logging.WARNING, address=self.address, refs=len(refs), code=error.code().name)

    async def _load(self) -> str:
        self.load = await self._stub.GetLoad(encoder_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT)
        return self.load.model_fingerprint


class LanguageModel(Backend):
    """One language model server.

    Attributes:
        load: what it last published.
    """

    service, peer = "triptych.llm.v1.LlmService", "language model"

    def __init__(self, address: str, fingerprint: str) -> None:
        super().__init__(address, fingerprint)
        self.load = llm_pb2.GetLoadResponse()
        self._stub: Any = llm_pb2_grpc.LlmServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, max_tokens: int, refs: Sequence[media_pb2.EmbeddingRef], request_id: str, timeout: float
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        """Stream an answer; closing the iterator cancels the call."""
        request = llm_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            spans=[span for item, ref in zip(prompt.items, refs, strict=True) for span in spans_to_proto(item, ref)],
            sampling=sampling_to_proto(prompt.sampling, max_tokens),
            cache_salt=prompt.cache_salt,
        )
        call = self._stub.Generate(request, timeout=timeout, metadata=outgoing_metadata())
        try:
            with errors_of(self.peer):
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def _load(self) -> str:
        self.load = await self._stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT)
        return self.load.model_fingerprint


class Backends:
    """All of them."""

    def __init__(self, encoders: Sequence[str], llms: Sequence[str], fingerprint: str) -> None:
        self.encoders = [Encoder(address, fingerprint) for address in encoders]
        self.llms = {address: LanguageModel(address, fingerprint) for address in llms}

    @property
    def ready(self) -> bool:
        """Whether every kind of request that this deployment takes can be answered."""
        return any(llm.ready for llm in self.llms.values()) and (not self.encoders or any(e.ready for e in self.encoders))

    async def refresh(self) -> None:
        """Poll every server once, at the same time."""
        await asyncio.gather(*(backend.refresh() for backend in (*self.encoders, *self.llms.values())))

    def choose_encoder(self) -> Encoder:
        """The encoder for all items of one request.

        Raises:
            ServiceError: UNAVAILABLE: none is ready.
        """
        return least_loaded(self.encoders)

    async def close(self) -> None:
        """Close every channel."""
        await asyncio.gather(*(backend.close() for backend in (*self.encoders, *self.llms.values())))


def least_loaded(backends: Sequence[B]) -> B:
    """The ready backend with the fewest requests; among equals the one chosen least often, which takes turns."""
    ready = [backend for backend in backends if backend.ready]
    if not ready:
        raise unavailable(f"no {backends[0].peer} is answering; try again, or look at its logs")
    return min(ready, key=lambda backend: (backend.active, backend.served))
