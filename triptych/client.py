"""The blocking client. Safe to share between threads; make it after a fork, not before."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Self, TypeVar, Unpack

import grpc

from triptych import health
from triptych.answer import ChatResult, Delta
from triptych.attempts import Attempts
from triptych.base import CHANNEL_OPTIONS, CHAT_SERVICE, ClientBase, StreamBase
from triptych.content import Messages
from triptych.gateway.v1 import gateway_pb2
from triptych.gateway.v1.gateway_pb2_grpc import ChatServiceStub
from triptych.pages import Pages
from triptych.pages_request import PageParts, PagesOptions
from triptych.reports import Estimate, Load, Model
from triptych.request import Options

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Stream(StreamBase):
    """An answer that is read as it is made. Entering waits until the request is admitted; leaving cancels the rest.

    Raises, on entering and while reading:
        TriptychError: any of `triptych.errors`; StreamTruncated if the stream ends without a complete answer.
    """

    def __enter__(self) -> Self:
        while True:
            attempts = self._attempts
            call = self._method(self._request, timeout=attempts.remaining(), metadata=attempts.metadata)
            try:
                first = next(call, None)
            except grpc.RpcError as failure:
                time.sleep(attempts.backoff(failure))
                continue
            except BaseException:
                call.cancel()
                raise
            self._call = call
            if first is not None:
                self._answer.feed(first)
            return self

    def __exit__(self, *error: object) -> None:
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._call is None:
            raise RuntimeError("open the stream first: `with client.stream(...) as stream:`")
        while not self._answer.deltas:
            try:
                event = next(self._call, None)
            except grpc.RpcError as failure:
                raise self._attempts.error(failure, answering=True) from failure
            if event is None:
                self._answer.finish()
                raise StopIteration
            self._answer.feed(event)
        return self._answer.deltas.popleft()


class Client(ClientBase):
    """A connection to one gateway, made on the first call. Every method raises `triptych.errors`."""

    def chat(self, messages: Messages, **options: Unpack[Options]) -> ChatResult:
        """Answers a question or conversation.

        Args:
            messages: a question, a list of its parts, or a list of messages with role and content.
            options: max_tokens, temperature, seed, stop, media, model, timeout, ...: see `Options`.
        """
        with self.stream(messages, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        """As `chat`, but the answer is read as it is made: `with client.stream(...) as s: for delta in s: ...`"""
        return Stream(self._stub.Chat, *self._prepare(gateway_pb2.ChatRequest, messages, options))

    def pages(self, question: str, pages: Iterable[PageParts], **options: Unpack[PagesOptions]) -> Pages:
        """Asks one question of every page of a document or segment of a video: `with client.pages(...) as answers:`

        Args:
            question: comes after each page.
            pages: media items, texts, lists of parts or `triptych.page(...)`, taken one by one when it is their turn.
            options: max_tokens, messages, remember, timeout, ...: see `PagesOptions`.
        """
        return Pages(self._stub.ChatPages, pages, *self._prepare_pages(question, pages, options))

    def estimate(self, messages: Messages, **options: Unpack[Options]) -> Estimate:
        """Counts tokens and cost without running a model; the arguments are those of `chat`."""
        prepared = self._prepare(gateway_pb2.EstimateTokensRequest, messages, options)
        return Estimate.from_proto(self._unary(self._stub.EstimateTokens, *prepared))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models served."""
        response = self._unary(self._stub.ListModels, gateway_pb2.ListModelsRequest(), self._attempts(timeout))
        return [Model.from_proto(model) for model in response.models]

    def load(self, *, timeout: float | None = None) -> Load:
        """How busy the gateway is."""
        response = self._unary(self._stub.GetLoad, gateway_pb2.GetLoadRequest(), self._attempts(timeout))
        return Load.from_proto(response)

    def ready(self, service: str = CHAT_SERVICE, *, timeout: float | None = None) -> bool:
        """Whether a service at this address takes requests, by its health; the gateway's unless another is named."""
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(health.CHECK)
        return health.is_serving(self._unary(check, health.request(service), self._attempts(timeout)))

    def close(self) -> None:
        """Closes the connection and cancels what runs on it."""
        if "_channel" in self.__dict__:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def _channel(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
        return grpc.secure_channel(self.address, self._credentials, CHANNEL_OPTIONS)

    @cached_property
    def _stub(self) -> ChatServiceStub:
        return ChatServiceStub(self._channel)

    def _unary(
        self, method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT], request: RequestT, attempts: Attempts
    ) -> ResponseT:
        while True:
            try:
                return method(request, timeout=attempts.remaining(), metadata=attempts.metadata)
            except grpc.RpcError as failure:
                time.sleep(attempts.backoff(failure))
