"""The one server interceptor: request ids, the drain gate, a bound on what requests hold, error mapping and a count of calls.

Servicers and everything below them raise; this is the only place that sets a status. An exception that nobody foresaw
becomes INTERNAL with an opaque text and the request id; its traceback goes to the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from services.common import logs
from services.common.errors import ServiceError, invalid, unavailable

logger = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID = 128
LARGE_BODY = 64 * 1024  # bytes; requests that have fewer always find room
# Answered even while draining, and not counted as work in flight.
_ALWAYS = ("/grpc.health.v1.", "/grpc.reflection.")


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    Attributes:
        in_flight: calls being answered; health, reflection and ``standing`` aside.
        held_bytes: of their single requests, which gRPC keeps to the end of a call.
        draining: when true, new calls are refused with UNAVAILABLE, but for ``open_while_draining``.

    Args:
        open_while_draining: names of methods that running requests still need, such as ``Fetch``.
        max_held_bytes: calls are refused beyond; one that is alone never is.
        standing: names of methods whose calls are not counted, such as streams that last as long as their readers.
    """

    def __init__(
        self,
        open_while_draining: frozenset[str] = frozenset(),
        max_held_bytes: float = math.inf,
        standing: frozenset[str] = frozenset(),
    ) -> None:
        self.open_while_draining, self.standing = open_while_draining | {"GetLoad"}, standing
        self.max_held_bytes = max_held_bytes
        self.in_flight = self.held_bytes = 0
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_ALWAYS):
            return handler
        given: Any = handler  # its fields are typed for servers with threads
        # A single request is read within the call: what is no message ends it as any other error does.
        coders: tuple[Any, Any] = (handler.request_deserializer, handler.response_serializer)
        read: Callable[[Any], Any] = _as_it_is
        if not handler.request_streaming and coders[0] is not None:
            read, coders = coders[0], (None, coders[1])
        if handler.response_streaming:
            streaming = self._streaming(method, given.stream_stream or given.unary_stream, read)
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            return make(streaming, *coders)
        unary = self._unary(method, given.stream_unary or given.unary_unary, read)
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        return make(unary, *coders)

    def _unary(
        self, method: str, handler: Callable[..., Awaitable[Any]], read: Callable[[Any], Any]
    ) -> Callable[..., Awaitable[Any]]:
        async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with _Call(self, method, context, request) as call:
                try:
                    return await handler(read(request), context)
                except (Exception, asyncio.CancelledError) as error:
                    await call.fail(error)

        return wrapped

    def _streaming(
        self, method: str, handler: Callable[..., AsyncGenerator[Any, None]], read: Callable[[Any], Any]
    ) -> Callable[..., AsyncIterator[Any]]:
        async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            async with _Call(self, method, context, request) as call:
                try:
                    async with aclosing(handler(read(request), context)) as stream:  # parked at yield, it learns of a cancel here
                        async for response in stream:
                            yield response
                except (Exception, asyncio.CancelledError) as error:
                    await call.fail(error)

        return wrapped


class _Call:
    """One call: sets the request id, counts it, logs how it ended."""

    def __init__(
        self, owner: ServiceInterceptor, method: str, context: grpc.aio.ServicerContext[Any, Any], request: object
    ) -> None:
        self.owner, self.method, self.context = owner, method, context
        self.name = method.rpartition("/")[2]
        self.size = len(request) if isinstance(request, bytes) else 0
        self.outcome = "OK"

    async def __aenter__(self) -> _Call:
        given = dict(self.context.invocation_metadata() or ()).get(REQUEST_ID_HEADER, "")
        self.request_id = clean_request_id(given if isinstance(given, str) else "")
        logs.request_id.set(self.request_id)
        self.started = time.monotonic()
        if self.owner.draining and self.name not in self.owner.open_while_draining:
            error = unavailable("the service is shutting down; send the request to another replica or try again")
            await self._abort(error)
        held = self.owner.held_bytes + self.size
        if self.size > LARGE_BODY and held > max(self.owner.max_held_bytes, self.size):
            await self._abort(full())
        self.owner.held_bytes = held
        if self.name not in self.owner.standing:
            self.owner.in_flight += 1
            self.owner.idle.clear()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.owner.in_flight -= self.name not in self.owner.standing
        self.owner.held_bytes -= self.size
        if self.owner.in_flight == 0:
            self.owner.idle.set()
        if isinstance(error, GeneratorExit):
            self.outcome = "CANCELLED"
        level = logging.DEBUG if self.method.endswith("/GetLoad") else logging.INFO
        seconds = round(time.monotonic() - self.started, 4)
        logs.event(logger, "call", level, method=self.method, outcome=self.outcome, seconds=seconds)

    async def fail(self, error: BaseException) -> NoReturn:
        """End the call with the status that ``error`` stands for."""
        if isinstance(error, grpc.aio.AbortError):
            self.outcome = "ABORTED"
            raise error
        if isinstance(error, asyncio.CancelledError):
            self.outcome = "CANCELLED"
            raise error
        await self._abort(explained(error, self.request_id, method=self.method))

    async def _abort(self, error: ServiceError) -> NoReturn:
        self.outcome = error.code.name
        details = error.to_proto(self.request_id).SerializeToString()
        trailer = ((REQUEST_ID_HEADER, self.request_id), ("grpc-status-details-bin", details))
        await self.context.abort(error.code, error.message, trailer)
        raise AssertionError("abort returned")


def _as_it_is(request: Any) -> Any:
    return request


def full() -> ServiceError:
    """There is no memory for a request's bytes."""
    text = "the bytes of other requests take all the memory there is for them; try again in 1.0 s"
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, text, reason="MEDIA_FULL", retry_delay=1.0)


def explained(error: BaseException, request_id: str, **fields: object) -> ServiceError:
    """What a client is told of an error; one that nobody foresaw is logged with ``fields``."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, TimeoutError):
        return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed; allow it more time")
    if isinstance(error, NotImplementedError):
        return ServiceError(grpc.StatusCode.UNIMPLEMENTED, "this server does not have the method; look at its protos")
    if isinstance(error, DecodeError):
        return invalid("request", "its bytes are not this method's message, or a text in it is not UTF-8; look at the protos")
    logger.error("unexpected error", exc_info=error, extra={"fields": fields})
    return ServiceError(grpc.StatusCode.INTERNAL, f"internal error; the log has the details under request id {request_id}")


def clean_request_id(given: str) -> str:
    """The caller's id where it is short and printable, else a new one."""
    if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
