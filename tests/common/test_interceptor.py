"""The interceptor over a real server: error mapping, request ids, the drain gate, and a stream that its reader leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common import logs
from services.common.errors import ServiceError, invalid, unavailable
from services.common.interceptor import REQUEST_ID_HEADER, ServiceInterceptor, clean_request_id
from tests.patience import PATIENCE
from triptych.common.v1 import error_pb2
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

SECRET = "object at 0x7f00deadbeef"


class Servicer(llm_pb2_grpc.LlmServiceServicer):
    """Does what the request id says."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Abort(self, request: Any, context: Any) -> Any:
        match request.request_id:
            case "bad":
                raise invalid("parts[0].image", "must be a picture", reason="BAD_MEDIA", limit=3)
            case "later":
                raise unavailable("come back", retry_delay=2.5)
            case "bug":
                raise RuntimeError(SECRET)
            case "slow":
                raise TimeoutError
        return llm_pb2.AbortResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield llm_pb2.GenerateResponse()
            if request.request_id == "bug":
                raise RuntimeError(SECRET)
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        return llm_pb2.GetLoadResponse(steps=1)


@asynccontextmanager
async def serving(
    open_while_draining: frozenset[str] = frozenset(),
    max_held_bytes: float = math.inf,
    standing: frozenset[str] = frozenset(),
) -> AsyncIterator[tuple[llm_pb2_grpc.LlmServiceStub, Servicer, ServiceInterceptor]]:
    interceptor, servicer = ServiceInterceptor(open_while_draining, max_held_bytes, standing), Servicer()
    server = grpc.aio.server(interceptors=[interceptor])
    llm_pb2_grpc.add_LlmServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield llm_pb2_grpc.LlmServiceStub(channel), servicer, interceptor
    await server.stop(None)


async def failure(call: Any) -> tuple[grpc.aio.AioRpcError, error_pb2.ErrorStatus, dict[str, bytes]]:
    """The error of a call, the status it carries, and the details' bytes by name."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    trailer = dict(raised.value.trailing_metadata() or ())
    status = error_pb2.ErrorStatus.FromString(trailer["grpc-status-details-bin"])  # type: ignore[arg-type]
    assert all(d.type_url.startswith("type.googleapis.com/google.rpc.") for d in status.details)
    return raised.value, status, {d.type_url.rpartition(".")[2]: d.value for d in status.details}


def abort(stub: llm_pb2_grpc.LlmServiceStub, name: str, **metadata: str) -> Any:
    return stub.Abort(llm_pb2.AbortRequest(request_id=name), metadata=tuple(metadata.items()), timeout=10)


@pytest.mark.asyncio
async def test_a_typed_error_arrives_with_field_reason_and_request_id() -> None:
    async with serving() as (stub, _, _):
        error, status, details = await failure(abort(stub, "bad", **{REQUEST_ID_HEADER: "mine"}))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert status.message == error.details() == "parts[0].image: must be a picture"
        (violation,) = error_pb2.BadRequest.FromString(details["BadRequest"]).field_violations
        assert violation.field == "parts[0].image"
        info = error_pb2.ErrorInfo.FromString(details["ErrorInfo"])
        assert (info.reason, info.domain, dict(info.metadata)) == ("BAD_MEDIA", "triptych", {"limit": "3"})
        assert error_pb2.RequestInfo.FromString(details["RequestInfo"]).request_id == "mine"


@pytest.mark.asyncio
async def test_unavailable_says_when_to_retry() -> None:
    async with serving() as (stub, _, _):
        error, _, details = await failure(abort(stub, "later"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error_pb2.RetryInfo.FromString(details["RetryInfo"]).retry_delay.ToMilliseconds() == 2500


@pytest.mark.asyncio
async def test_a_deadline_that_passed_inside_is_told_as_such() -> None:
    async with serving() as (stub, _, _):
        error, _, _ = await failure(abort(stub, "slow"))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_a_method_that_nobody_wrote_is_told_as_such() -> None:
    async with serving() as (stub, _, _):
        error, _, _ = await failure(stub.StreamResponses(llm_pb2.StreamResponsesRequest(), timeout=10).read())
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.asyncio
async def test_a_standing_call_is_not_waited_for_and_not_taken_while_draining() -> None:
    async with serving(standing=frozenset({"Generate"})) as (stub, servicer, interceptor):
        call = stub.Generate(llm_pb2.GenerateRequest(), timeout=10)
        await call.read()
        assert interceptor.in_flight == 0 and interceptor.idle.is_set()
        interceptor.draining = True
        error, _, _ = await failure(stub.Generate(llm_pb2.GenerateRequest(), timeout=10).read())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert not servicer.left.is_set()
        call.cancel()
        await asyncio.wait_for(servicer.left.wait(), PATIENCE)
        assert interceptor.in_flight == 0 and interceptor.idle.is_set()


@pytest.mark.asyncio
async def test_a_bug_is_opaque_to_the_client_and_whole_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (stub, _, _):
        with caplog.at_level(logging.ERROR):
            error, status, _ = await failure(abort(stub, "bug", **{REQUEST_ID_HEADER: "r17"}))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "r17" in status.message and "0x" not in status.message and "RuntimeError" not in status.message
        assert any(record.exc_info and SECRET in str(record.exc_info[1]) for record in caplog.records)


@pytest.mark.asyncio
async def test_a_bug_in_a_stream_is_opaque_too() -> None:
    async with serving() as (stub, servicer, _):
        stream = stub.Generate(llm_pb2.GenerateRequest(request_id="bug"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stream:
                pass
        assert raised.value.code() == grpc.StatusCode.INTERNAL and "0x" not in str(raised.value.details())
        assert servicer.left.is_set()


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_told_as_such() -> None:
    interceptor = ServiceInterceptor()
    server = grpc.aio.server(interceptors=[interceptor])
    llm_pb2_grpc.add_LlmServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for junk in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):  # no field; a request_id that is not UTF-8
            for call in (
                channel.unary_unary("/triptych.llm.v1.LlmService/Abort")(junk, timeout=10),
                channel.unary_stream("/triptych.llm.v1.LlmService/Generate")(junk, timeout=10).read(),
            ):
                error, _, details = await failure(call)
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "UTF-8" in str(error.details())
                assert "BadRequest" in details
        assert interceptor.in_flight == 0
    await server.stop(None)


@pytest.mark.asyncio
async def test_leaving_a_stream_reaches_the_handler_and_the_count() -> None:
    async with serving() as (stub, servicer, interceptor):
        stream = stub.Generate(llm_pb2.GenerateRequest(), timeout=30)
        await stream.read()
        assert interceptor.in_flight == 1
        stream.cancel()
        await asyncio.wait_for(servicer.left.wait(), PATIENCE)
        await asyncio.wait_for(interceptor.idle.wait(), PATIENCE)
        assert interceptor.in_flight == 0


@pytest.mark.asyncio
async def test_the_bytes_of_all_requests_have_a_limit_and_small_ones_pass() -> None:
    async with serving(max_held_bytes=200_000) as (stub, _, interceptor):
        large, small = (llm_pb2.GenerateRequest(token_ids=[1] * count) for count in (150_000, 100))
        held = stub.Generate(large)
        assert await held.read() is not grpc.aio.EOF
        error, _, details = await failure(stub.Generate(large).read())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "RetryInfo" in details
        assert error_pb2.ErrorInfo.FromString(details["ErrorInfo"]).reason == "MEDIA_FULL"
        beside = stub.Generate(small)
        assert await beside.read() is not grpc.aio.EOF
        for call in (held, beside):
            call.cancel()
        await asyncio.wait_for(interceptor.idle.wait(), PATIENCE)
        assert interceptor.held_bytes == 0
        alone = stub.Generate(llm_pb2.GenerateRequest(token_ids=[1] * 500_000))  # more than the limit, and nobody else's
        assert await alone.read() is not grpc.aio.EOF
        alone.cancel()
        await asyncio.wait_for(interceptor.idle.wait(), PATIENCE)


@pytest.mark.asyncio
async def test_draining_refuses_new_calls_but_those_that_running_work_needs() -> None:
    async with serving(frozenset({"Abort"})) as (stub, _, interceptor):
        running = stub.Generate(llm_pb2.GenerateRequest(), timeout=30)
        await running.read()
        interceptor.draining = True
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(llm_pb2.GenerateRequest(), timeout=10).read()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        await abort(stub, "anything")
        assert (await stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE)).steps == 1
        assert interceptor.in_flight == 1
        running.cancel()
        await asyncio.wait_for(interceptor.idle.wait(), PATIENCE)


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        if request == b"bug":
            raise RuntimeError(SECRET)
        yield request


async def joined(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([response async for response in echo(requests, context)])


@pytest.mark.asyncio
async def test_calls_whose_client_streams_are_wrapped_alike() -> None:
    interceptor = ServiceInterceptor()
    server = grpc.aio.server(interceptors=[interceptor])
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo), "Join": grpc.stream_unary_rpc_method_handler(joined)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.stream_unary("/t.T/Join")(iter([b"a", b"b"]), timeout=10) == b"ab"
        running = channel.stream_stream("/t.T/Echo")(timeout=10)
        await running.write(b"a")
        assert await running.read() == b"a" and interceptor.in_flight == 1
        interceptor.draining = True
        for refused in (channel.stream_unary("/t.T/Join")(timeout=10), channel.stream_stream("/t.T/Echo")(timeout=10).read()):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await refused
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        await running.write(b"b")  # what runs goes on
        assert await running.read() == b"b"
        await running.write(b"bug")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.read()
        assert raised.value.code() == grpc.StatusCode.INTERNAL and "0x" not in str(raised.value.details())
        assert interceptor.in_flight == 0
    await server.stop(None)


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("", False), ("x" * 128, True), ("x" * 129, False), ("a\nb", False)]
)
def test_request_ids_are_short_and_printable(given: str, kept: bool) -> None:
    cleaned = clean_request_id(given)
    assert (cleaned == given) is kept
    assert 0 < len(cleaned) <= 128 and cleaned.isprintable()


def test_errors_survive_the_wire() -> None:
    error = ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "full", field="messages", reason="QUEUE_FULL", metadata={"limit": 4}, retry_delay=0.25
    )
    again = ServiceError.from_proto(error.to_proto("id"))
    assert vars(again) == vars(error)


def test_log_lines_are_json_with_the_request_id() -> None:
    logs.request_id.set("r5")
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "call", None, None)
    record.fields = {"seconds": 1.5}
    line = json.loads(logs.JsonFormatter("llm").format(record))
    assert (line["event"], line["request_id"], line["service"], line["seconds"]) == ("call", "r5", "llm", 1.5)
