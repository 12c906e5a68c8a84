"""Asks a running stack for the odd cases: what came of each must be what the case states."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from services.common.errors import ServiceError
from services.models.wire import from_chunk
from tests.stack.conftest import RunningStack
from tests.stack.odd_cases import INVALID, OK, Odd
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc

SEEN_BY_NO_CLIENT = re.compile(r"0x[0-9a-f]{6,}|Traceback|object at|(?<!image)/\w+/\w+|\d+\.\d+\.\d+\.\d+|\.py\b|\n")
SAME, DIFFERENT = 1e-3, 1e-2  # logits of the same picture, and of another one


@dataclass(frozen=True)
class Answer:
    """What came of a request that was taken."""

    estimate: gateway_pb2.EstimateTokensResponse
    responses: list[gateway_pb2.ChatResponse]

    @property
    def tokens(self) -> list[int]:
        return [token for response in self.responses for token in response.delta.token_ids]

    @property
    def done(self) -> gateway_pb2.Done:
        assert self.responses[-1].HasField("done")
        return self.responses[-1].done

    @property
    def logits(self) -> torch.Tensor:
        """``[vocab]`` of the first token."""
        (first,) = (r.delta.first_logits for r in self.responses if r.delta.HasField("first_logits"))
        return from_chunk(first)[0]


class Client:
    """Asks the gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = gateway_pb2_grpc.ChatServiceStub(channel)

    async def ask(self, request: gateway_pb2.ChatRequest) -> Answer:
        """An estimate, then an answer.

        Raises:
            ServiceError: what came instead.
        """
        try:
            estimated = gateway_pb2.EstimateTokensRequest(messages=request.messages, sampling=request.sampling)
            estimate = await self.stub.EstimateTokens(estimated, timeout=60)
            return Answer(estimate, [response async for response in self.stub.Chat(request, timeout=60)])
        except grpc.aio.AioRpcError as error:
            assert error.code() is not grpc.StatusCode.UNKNOWN, error
            raise ServiceError.from_rpc(error, "gateway") from None

    async def check(self, odd: Odd) -> Answer | ServiceError:
        """Ask for it; the outcome must be the stated one, an answer what was estimated, a refusal one that teaches."""
        try:
            answer = await self.ask(odd.request)
        except ServiceError as error:
            assert odd.outcome == INVALID and error.code is grpc.StatusCode.INVALID_ARGUMENT, f"{odd}: {error}"
            field, words = odd.refused
            assert error.field == field and error.message.startswith(f"{field}: "), f"{odd}: {error.field}: {error}"
            assert all(word in error.message for word in words), f"{odd}: {error}"
            assert not SEEN_BY_NO_CLIENT.search(error.message), f"{odd}: {error}"
            return error
        assert odd.outcome == OK, f"{odd} was answered"
        estimate, done = answer.estimate, answer.done
        done.usage.prompt_tokens_details.cached = 0
        assert done.usage.prompt_tokens_details == estimate.prompt_tokens_details, odd
        assert done.usage.prompt_tokens == estimate.prompt_tokens and len(answer.tokens) == done.usage.completion_tokens > 0, odd
        assert list(answer.responses[0].admitted.media) == list(estimate.media), odd
        return answer


@asynccontextmanager
async def client_of(stack: RunningStack) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(stack.address, [("grpc.max_send_message_length", -1)]) as channel:
        yield Client(channel)


def alone(stack: RunningStack, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Run it with a client of its own; afterwards the stack is idle."""

    async def run() -> None:
        async with client_of(stack) as client:
            await work(client)

    asyncio.run(run())
    stack.wait_until(lambda loads: not loads.busy())


def apart(one: Answer, other: Answer) -> float:
    """Largest difference of their first logits."""
    return float((one.logits - other.logits).abs().max())
