"""A fake encoder, a fake language model, and a gateway between them in this process."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from PIL import Image

from services.common.errors import ServiceError
from services.common.interceptor import ServiceInterceptor
from services.common.server import SERVER_OPTIONS
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from tests.patience import PATIENCE
from triptych.common.v1 import sampling_pb2, tensor_pb2, usage_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class FakeEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Accepts everything; ``error`` fails every item, ``gate`` delays the answers."""

    service = "triptych.encoder.v1.EncoderService"

    def __init__(self) -> None:
        self.items: list[encoder_pb2.EncodeRequest] = []
        self.refs: set[str] = set()
        self.load = encoder_pb2.GetLoadResponse()
        self.error: ServiceError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.metadata: dict[str, str] = {}
        self.time_left = 0.0

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Context) -> encoder_pb2.EncodeResponse:
        self.items.append(request)
        self.metadata, self.time_left = dict(context.invocation_metadata()), context.time_remaining()
        ref = f"ref{len(self.items)}"
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.refs.add(ref)
        return encoder_pb2.EncodeResponse(ref_id=ref)

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Context) -> encoder_pb2.ReleaseResponse:
        self.refs -= set(request.ref_ids)
        return encoder_pb2.ReleaseResponse()

    async def GetLoad(self, request: encoder_pb2.GetLoadRequest, context: Context) -> encoder_pb2.GetLoadResponse:
        self.load.refs = len(self.refs)
        return self.load

    async def Fetch(self, request: encoder_pb2.FetchRequest, context: Context) -> AsyncIterator[encoder_pb2.FetchResponse]:
        raise AssertionError("the gateway never touches an embedding")
        yield


@dataclass
class Script:
    """What the fake language model answers: deltas of tokens, then its end."""

    deltas: Sequence[Sequence[int]] = ((1, 2, 3),)
    reason: usage_pb2.FinishReason.ValueType = usage_pb2.FINISH_REASON_LENGTH
    error: ServiceError | None = None
    complete: bool = True


class FakeLlm(llm_pb2_grpc.LlmServiceServicer):
    """Streams ``script``; ``gate`` holds it back after the first delta."""

    service = "triptych.llm.v1.LlmService"

    def __init__(self) -> None:
        self.script = Script()
        self.requests: list[llm_pb2.GenerateRequest] = []
        self.running = self.cancelled = 0
        self.load = llm_pb2.GetLoadResponse(total_blocks=1000, block_size=16)
        self.gate = asyncio.Event()
        self.gate.set()
        self.metadata: dict[str, str] = {}
        self.time_left = 0.0

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata, self.time_left = dict(context.invocation_metadata()), context.time_remaining()
        self.running += 1
        finished = False
        try:
            yield llm_pb2.GenerateResponse(admitted=llm_pb2.Admitted(cached_tokens=3))
            for index, tokens in enumerate(self.script.deltas):
                delta = llm_pb2.Delta(token_ids=tokens)
                if index == 0 and request.sampling.include_first_logits:
                    delta.first_logits.CopyFrom(tensor_pb2.TensorChunk(shape=[1, 2], total_rows=1, data=b"12345678"))
                yield llm_pb2.GenerateResponse(delta=delta)
                await self.gate.wait()
            if self.script.error is not None:
                finished = True
                raise self.script.error
            if self.script.complete:
                yield llm_pb2.GenerateResponse(
                    done=llm_pb2.Done(
                        finish_reason=self.script.reason,
                        cached_tokens=3,
                        completion_tokens=sum(map(len, self.script.deltas)),
                        stage_times=usage_pb2.StageTimes(encode=0.5, prefill=0.25, decode=0.125),
                    )
                )
            finished = True
        finally:
            self.running -= 1
            self.cancelled += not finished

    async def Abort(self, request: llm_pb2.AbortRequest, context: Context) -> llm_pb2.AbortResponse:
        raise AssertionError("the gateway cancels instead")

    async def GetLoad(self, request: llm_pb2.GetLoadRequest, context: Context) -> llm_pb2.GetLoadResponse:
        return self.load


@asynccontextmanager
async def served(register: Callable[[grpc.aio.Server], None], service: str) -> AsyncIterator[str]:
    """A server of this process, as services.common.server sets one up; yields its address."""
    server = grpc.aio.server(interceptors=[ServiceInterceptor()], options=SERVER_OPTIONS)
    register(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


def served_encoder(encoder: FakeEncoder) -> Any:
    return served(lambda server: encoder_pb2_grpc.add_EncoderServiceServicer_to_server(encoder, server), encoder.service)


def served_llm(llm: FakeLlm) -> Any:
    return served(lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server), llm.service)


class FakeReadiness:
    """Remembers what it was told."""

    ready = False

    async def set(self, ready: bool) -> None:
        self.ready = ready


@dataclass
class Stack:
    """A gateway with its fakes."""

    service: GatewayService
    stub: Any
    encoder: FakeEncoder
    llm: FakeLlm
    address: str
    llm_address: str
    encoder_address: str
    readiness: FakeReadiness = field(default_factory=FakeReadiness)

    async def load(self) -> gateway_pb2.GetLoadResponse:
        return await self.stub.GetLoad(gateway_pb2.GetLoadRequest())

    async def idle(self) -> None:
        """Wait until nothing is held anywhere, and check the ledger."""
        ledger, encoders = self.service.ledger, self.service.backends.encoders
        await until(lambda: not (self.llm.running or ledger.running or ledger.queued or any(e.active for e in encoders)))
        assert not self.encoder.refs
        ledger.check_integrity()
        load = await self.load()
        assert (load.running_requests, load.queued_requests, load.reserved_kv_blocks) == (0, 0, 0)


@asynccontextmanager
async def stack(checkpoint: Path, *, with_encoder: bool = True, **options: Any) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        encoder, llm = FakeEncoder(), FakeLlm()
        encoder_address = await exits.enter_async_context(served_encoder(encoder))
        llm_address = await exits.enter_async_context(served_llm(llm))
        config = GatewayConfig(model=str(checkpoint), encoder=encoder_address if with_encoder else "", llm=llm_address, **options)
        service, readiness = GatewayService(config), FakeReadiness()
        address = await exits.enter_async_context(served(service.register, service.name))
        await service.start(readiness, address)  # type: ignore[arg-type]
        exits.push_async_callback(service.stop)
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        stub = gateway_pb2_grpc.ChatServiceStub(channel)
        await all_ready(service)
        yield Stack(service, stub, encoder, llm, address, llm_address, encoder_address, readiness)


async def all_ready(service: GatewayService) -> None:
    """Until every server has answered a poll: the first, unless the machine stood still."""
    backends = service.backends
    await until(lambda: all(server.ready for server in (*backends.encoders, *backends.llms.values())) and backends.ready)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def picture(width: int = 56, height: int = 56, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, format, **options)
    return out.getvalue()


def part(content: str | bytes | tuple[str, bytes]) -> gateway_pb2.Part:
    """Text, a picture, or a modality's name and a file of it."""
    if isinstance(content, str):
        return gateway_pb2.Part(text=content)
    if isinstance(content, tuple):
        return gateway_pb2.Part(**{content[0]: gateway_pb2.Media(data=content[1])})
    return gateway_pb2.Part(image=gateway_pb2.Media(data=content))


def user(*parts: str | bytes | tuple[str, bytes]) -> gateway_pb2.Message:
    return gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[part(p) for p in parts])


def ask(*parts: str | bytes | tuple[str, bytes], model: str = "", **sampling: Any) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(model=model, messages=[user(*parts)], sampling=sampling_pb2.SamplingParams(**sampling))


@contextmanager
def refused(code: grpc.StatusCode, text: str = "") -> Iterator[list[ServiceError]]:
    """Expect a call to fail; the error lands in the list."""
    errors: list[ServiceError] = []
    try:
        yield errors
    except grpc.aio.AioRpcError as error:
        errors.append(ServiceError.from_rpc(error, "gateway"))
    except ServiceError as error:
        errors.append(error)
    assert errors, "the call was not refused"
    assert errors[0].code == code, errors[0].message
    assert text in errors[0].message, errors[0].message
