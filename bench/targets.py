"""Servers under load, by the two ways in: OpenAI's HTTP, which any of them speaks, and Triptych's gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc
import openai

from bench.workloads import Part
from triptych.base import CHANNEL_OPTIONS
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.request import Options, build

Message = dict[str, Any]
SECONDS = 600.0


class Refused(Exception):
    """The server was too busy to take the request, and said so."""


class Target(Protocol):
    """A server."""

    def ask(self, messages: Sequence[Message], max_tokens: int) -> AsyncIterator[str]:
        """The pieces of a greedy answer of so many tokens, as they come.

        Raises:
            Refused: it is too busy.
        """

    async def close(self) -> None:
        """Close the connections."""


class Http:
    """Any server with OpenAI's ``/v1/chat/completions``."""

    def __init__(self, base_url: str, model: str = "default") -> None:
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=SECONDS, max_retries=0)
        self._model = model

    async def ask(self, messages: Sequence[Message], max_tokens: int) -> AsyncIterator[str]:
        try:
            stream = await self._client.chat.completions.create(
                model=self._model,
                messages=list(messages),  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        except (openai.RateLimitError, openai.InternalServerError) as error:
            if error.status_code in (429, 503):
                raise Refused(str(error)) from None
            raise
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content is not None:
                    yield chunk.choices[0].delta.content

    async def close(self) -> None:
        await self._client.close()


class Grpc:
    """A Triptych gateway, without the SDK's second attempts."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub: Any = gateway_pb2_grpc.ChatServiceStub(self._channel)

    async def connect(self) -> None:
        """Wait until the connection stands, which is no part of what is measured."""
        await self._channel.channel_ready()

    async def ask(self, messages: Sequence[Message], max_tokens: int) -> AsyncIterator[str]:
        options: Options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        call = self._stub.Chat(build(gateway_pb2.ChatRequest, messages, options), timeout=SECONDS)
        try:
            async for event in call:
                if event.HasField("delta"):
                    yield event.delta.text
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                raise Refused(error.details()) from None
            raise
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def user(parts: Sequence[Part]) -> Message:
    """A turn of the user's."""
    return {"role": "user", "content": list(parts)}


def assistant(text: str) -> Message:
    """An answer of the model's."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
