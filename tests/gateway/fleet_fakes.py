"""A gateway between several fake encoders and language models, which can be lost at any point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from gateway_fakes import Context, FakeEncoder, FakeLlm, FakeReadiness, all_ready, served, served_encoder, until

from services.common.errors import ServiceError
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc


async def vanish(context: Context) -> None:
    """End a call as gRPC does when the server is gone: without details."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class LosableEncoder(FakeEncoder):
    """``gone`` makes every call fail as if nobody were there."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False

    async def Encode(self, request: Any, context: Context) -> Any:
        if self.gone:
            self.items.append(request)
            await vanish(context)
        return await super().Encode(request, context)

    async def GetLoad(self, request: Any, context: Context) -> Any:
        if self.gone:
            await vanish(context)
        return await super().GetLoad(request, context)


class TellingLlm(FakeLlm):
    """Answers with tokens that follow from the prompt's length, the answer's index and the place, so that any server can go on.

    Attributes:
        silent: leaves polls without an answer.
        lost_after: ends a call without a word when it has sent this many tokens of an answer; ``gone`` from then on.
        failures: raised by the next calls, before any token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost_after: int | None = None
        self.gone = self.silent = False
        self.failures: list[Callable[[llm_pb2.GenerateRequest], ServiceError]] = []
        self.began: list[list[int]] = []

    @staticmethod
    def token(prompt: int, index: int, place: int) -> int:
        return 300 + (7 * prompt + 31 * index + 3 * place) % 200

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self.requests.append(request)
        self.running += 1
        try:
            if self.gone:
                await vanish(context)
            yield llm_pb2.GenerateResponse(admitted=llm_pb2.Admitted(cached_tokens=3))
            if self.failures:
                raise self.failures.pop(0)(request)
            begun = list(request.answer_token_ids)
            self.began.append(begun)
            answers, sent = max(1, request.sampling.n), 0
            for place in range(len(begun), request.sampling.max_tokens):
                if sent == self.lost_after:
                    self.gone = True
                    await vanish(context)
                for index in range(answers):
                    yield llm_pb2.GenerateResponse(delta=self._delta(request, index, place))
                sent += 1
                await self.gate.wait()
            if sent == self.lost_after:
                self.gone = True
                await vanish(context)
            for index in range(answers):
                yield llm_pb2.GenerateResponse(
                    done=llm_pb2.Done(
                        index=index, last=index == answers - 1, finish_reason=usage_pb2.FINISH_REASON_LENGTH,
                        completion_tokens=request.sampling.max_tokens,
                    )
                )  # fmt: skip
        finally:
            self.running -= 1

    def _delta(self, request: llm_pb2.GenerateRequest, index: int, place: int) -> llm_pb2.Delta:
        token = self.token(len(request.token_ids), index, place)
        delta = llm_pb2.Delta(index=index, token_ids=[token])
        if request.sampling.HasField("logprobs"):
            top = [llm_pb2.TopLogprob(token_id=token + k, logprob=-1 - k) for k in range(request.sampling.logprobs)]
            delta.logprobs.add(token_id=token, logprob=-0.5, rank=1, top=top)
        return delta

    async def GetLoad(self, request: Any, context: Context) -> Any:
        if self.gone:
            await vanish(context)
        if self.silent:
            await asyncio.Event().wait()
        return self.load


@dataclass
class Fleet:
    """What runs."""

    service: GatewayService
    stub: Any
    encoders: dict[str, LosableEncoder]
    llms: dict[str, TellingLlm]
    readiness: FakeReadiness = field(default_factory=FakeReadiness)

    async def answer(self, request: gateway_pb2.ChatRequest, **options: Any) -> list[gateway_pb2.ChatResponse]:
        return [event async for event in self.stub.Chat(request, timeout=20, **options)]

    def expected(self, llm: str, count: int, index: int = 0) -> list[int]:
        """Tokens that the last prompt of a language model is answered with."""
        prompt = len(self.llms[llm].requests[-1].token_ids)
        return [TellingLlm.token(prompt, index, place) for place in range(count)]

    async def idle(self) -> None:
        """Wait until nothing is held anywhere."""
        ledger, backends = self.service.ledger, self.service.backends
        peers = [*backends.encoders, *backends.llms.values()]
        await until(lambda: not (ledger.running or ledger.queued or any(peer.active for peer in peers)))
        await until(lambda: not any(llm.running for llm in self.llms.values()))  # a cancel takes a moment to get there
        assert not any(encoder.refs for encoder in self.encoders.values() if not encoder.gone)
        assert not any(encoder.patches or encoder.held for encoder in backends.encoders)
        ledger.check_integrity()
        assert ledger.reserved_blocks == 0


@asynccontextmanager
async def fleet(
    checkpoint: Path, *, encoders: int = 2, llms: int = 2, llm: type[TellingLlm] = TellingLlm, **options: Any
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as exits:
        fakes = [LosableEncoder() for _ in range(encoders)]
        speakers = [llm() for _ in range(llms)]
        encoder_addresses = [await exits.enter_async_context(served_encoder(fake)) for fake in fakes]
        llm_addresses = [await exits.enter_async_context(served_llm(fake)) for fake in speakers]
        config = GatewayConfig(model=str(checkpoint), encoder=",".join(encoder_addresses), llm=",".join(llm_addresses), **options)
        service, readiness = GatewayService(config), FakeReadiness()
        address = await exits.enter_async_context(served(service.register, service.name))
        await service.start(readiness, address)  # type: ignore[arg-type]
        exits.push_async_callback(service.stop)
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        await all_ready(service)
        yield Fleet(
            service, gateway_pb2_grpc.ChatServiceStub(channel), dict(zip(encoder_addresses, fakes, strict=True)),
            dict(zip(llm_addresses, speakers, strict=True)), readiness,
        )  # fmt: skip


def served_llm(llm: TellingLlm) -> Any:
    return served(lambda server: llm_pb2_grpc.add_LlmServiceServicer_to_server(llm, server), llm.service)


def tokens_of(events: list[gateway_pb2.ChatResponse], index: int = 0) -> list[int]:
    return [token for event in events if event.delta.index == index for token in event.delta.token_ids]
