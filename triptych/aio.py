"""The asyncio client: the same methods as the blocking one, awaited. Use it on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from triptych import health
from triptych.answer import ChatResult, Delta
from triptych.attempts import Attempts
from triptych.base import CHANNEL_OPTIONS, CHAT_SERVICE, ClientBase, StreamBase
from triptych.content import Messages
from triptych.gateway.v1 import gateway_pb2
from triptych.gateway.v1.gateway_pb2_grpc import ChatServiceStub
from triptych.pages_aio import AsyncPages
from triptych.pages_request import PageParts, PagesOptions
from triptych.reports import Estimate, Load, Model
from triptych.request import Options

if TYPE_CHECKING:
    from triptych.gateway.v1.gateway_pb2_grpc import ChatServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class AsyncStream(StreamBase):
    """As `Stream`, with `async with` and `async for`."""

    async def __aenter__(self) -> Self:
        while True:
            attempts = self._attempts
            self._call = self._method(self._request, timeout=attempts.remaining(), metadata=attempts.metadata)
            try:
                first = await self._call.read()
            except grpc.RpcError as failure:
                await asyncio.sleep(attempts.backoff(failure))
                continue
            except BaseException:
                self._call.cancel()
                raise
            if isinstance(first, gateway_pb2.ChatResponse):
                self._answer.feed(first)
            return self

    async def __aexit__(self, *error: object) -> None:
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._call is None:
            raise RuntimeError("open the stream first: `async with client.stream(...) as stream:`")
        while not self._answer.deltas:
            try:
                event = await self._call.read()
            except grpc.RpcError as failure:
                raise self._attempts.error(failure, answering=True) from failure
            if not isinstance(event, gateway_pb2.ChatResponse):
                self._answer.finish()
                raise StopAsyncIteration
            self._answer.feed(event)
        return self._answer.deltas.popleft()


class AsyncClient(ClientBase):
    """As `Client`, for asyncio. Every method raises `triptych.errors`."""

    async def chat(self, messages: Messages, **options: Unpack[Options]) -> ChatResult:
        """Answers a question or conversation; the arguments are those of `Client.chat`."""
        async with self.stream(messages, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        """As `chat`, read as it is made: `async with client.stream(...) as s: async for delta in s: ...`"""
        return AsyncStream(self._stub.Chat, *self._prepare(gateway_pb2.ChatRequest, messages, options))

    def pages(
        self, question: str, pages: Iterable[PageParts] | AsyncIterable[PageParts], **options: Unpack[PagesOptions]
    ) -> AsyncPages:
        """Asks one question of every page; the arguments are those of `Client.pages`, and `pages` may be asynchronous."""
        return AsyncPages(self._stub.ChatPages, pages, *self._prepare_pages(question, pages, options))

    async def estimate(self, messages: Messages, **options: Unpack[Options]) -> Estimate:
        """Counts tokens and cost without running a model; the arguments are those of `chat`."""
        prepared = self._prepare(gateway_pb2.EstimateTokensRequest, messages, options)
        return Estimate.from_proto(await self._unary(self._stub.EstimateTokens, *prepared))

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models served."""
        response = await self._unary(self._stub.ListModels, gateway_pb2.ListModelsRequest(), self._attempts(timeout))
        return [Model.from_proto(model) for model in response.models]

    async def load(self, *, timeout: float | None = None) -> Load:
        """How busy the gateway is."""
        response = await self._unary(self._stub.GetLoad, gateway_pb2.GetLoadRequest(), self._attempts(timeout))
        return Load.from_proto(response)

    async def ready(self, service: str = CHAT_SERVICE, *, timeout: float | None = None) -> bool:
        """Whether a service at this address takes requests, by its health; the gateway's unless another is named."""
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(health.CHECK)
        return health.is_serving(await self._unary(check, health.request(service), self._attempts(timeout)))

    async def close(self) -> None:
        """Closes the connection and cancels what runs on it."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._credentials, CHANNEL_OPTIONS)

    @cached_property
    def _stub(self) -> ChatServiceAsyncStub:
        return ChatServiceStub(self._channel)

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT], request: RequestT, attempts: Attempts
    ) -> ResponseT:
        while True:
            try:
                return await method(request, timeout=attempts.remaining(), metadata=attempts.metadata)
            except grpc.RpcError as failure:
                await asyncio.sleep(attempts.backoff(failure))
