"""Two encoders and two language models as processes: one of each is killed under load, restarted, and drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.local_fleet import LocalFleet, local_fleet
from tests.media_files import file_bytes, picture
from tests.patience import PATIENCE
from tests.stack.odd_cases import asking, image, text
from triptych.common.v1 import sampling_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

LENGTH, COMPARED = 1500, 400  # tokens of an answer that has not ended when something happens to it


def long_answer(length: int = LENGTH) -> gateway_pb2.ChatRequest:
    """What is drawn first does not depend on how much is drawn after it."""
    request = about(1)
    request.sampling.CopyFrom(sampling_pb2.SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.1))
    request.sampling.max_tokens = request.sampling.min_tokens = length
    return request


def about(seed: int, max_tokens: int = 4) -> gateway_pb2.ChatRequest:
    """A question about a picture of its own."""
    request = asking(image(file_bytes(picture(60 + seed % 40, 80, seed=seed), "PNG")), text("what?"))
    request.sampling.max_tokens = max_tokens
    return request


class Watched:
    """A fleet, asked through its gateway and looked at from behind."""

    def __init__(self, fleet: LocalFleet, channels: dict[str, grpc.aio.Channel]) -> None:
        self.fleet = fleet
        self.chat: Any = gateway_pb2_grpc.ChatServiceStub(channels[fleet.address])
        self.encoders: dict[str, Any] = {a: encoder_pb2_grpc.EncoderServiceStub(channels[a]) for a in fleet.members["encoder"]}
        self.llms: dict[str, Any] = {a: llm_pb2_grpc.LlmServiceStub(channels[a]) for a in fleet.members["llm"]}

    async def tokens(self, request: gateway_pb2.ChatRequest) -> list[int]:
        """An answer's tokens; it must be complete."""
        events = [event async for event in self.chat.Chat(request, timeout=60)]
        assert events[-1].done.last
        return [token for event in events for token in event.delta.token_ids]

    async def encoded(self) -> dict[str, int]:
        """Items that each encoder has encoded."""
        loads = await asyncio.gather(
            *(stub.GetLoad(encoder_pb2.GetLoadRequest(), timeout=PATIENCE) for stub in self.encoders.values())
        )
        return {address: load.encoded_items for address, load in zip(self.encoders, loads, strict=True)}

    async def busy_llm(self) -> str:
        """The language model that has a sequence; none if an answer has ended meanwhile."""
        loads = await asyncio.gather(*(stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE) for stub in self.llms.values()))
        busy = [address for address, load in zip(self.llms, loads, strict=True) if load.running_sequences]
        assert len(busy) <= 1
        return busy[0] if busy else ""

    async def in_the_middle(self, happens: Callable[[str], None]) -> str:
        """Let something happen to the language model that gives a long answer, which goes on; returns its address."""
        undisturbed = await self.tokens(long_answer(COMPARED))
        for _ in range(5):
            tokens, at, llm = list[int](), 0, ""
            async for event in self.chat.Chat(long_answer(), timeout=120):
                tokens += event.delta.token_ids
                if len(tokens) >= 20 and not at:
                    at, llm = len(tokens), await self.busy_llm()
                    if llm:
                        happens(llm)
            assert event.done.last and event.done.usage.completion_tokens == len(tokens) == LENGTH > at
            assert tokens[:COMPARED] == undisturbed
            if llm:
                return llm
        raise AssertionError("every time the answer had ended before this process looked")

    async def ends(self, kind: str, address: str) -> int:
        """Exit code of a process that is about to end."""
        return await asyncio.to_thread(self.fleet.end_of, kind, address)

    async def used_again(self, kind: str, address: str) -> None:
        """Ask until a server that was restarted gets requests."""
        for number in range(1000):
            if kind == "encoder":
                await self.tokens(about(5000 + number))
                if (await self.encoded())[address]:
                    return
            else:
                request = asking(text(f"{number} is a number"))
                request.sampling.max_tokens = 2
                await self.tokens(request)
                load = await self.llms[address].GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE)
                if load.steps:
                    return
        raise AssertionError(f"the {kind} at {address} gets nothing")

    async def idle(self) -> None:
        """Wait until nobody holds anything."""
        async with asyncio.timeout(PATIENCE):
            while True:
                load = await self.chat.GetLoad(gateway_pb2.GetLoadRequest(), timeout=PATIENCE)
                refs = [
                    (await self.encoders[a].GetLoad(encoder_pb2.GetLoadRequest(), timeout=PATIENCE)).refs
                    for a, child in self.fleet.members["encoder"].items()
                    if child.returncode is None
                ]
                if not (load.running_requests or load.reserved_kv_blocks or any(refs)):
                    return


@asynccontextmanager
async def watched(model: Path, logs: Path) -> AsyncIterator[Watched]:
    with local_fleet(str(model), logs, "--dtype", "float32") as fleet:
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
        addresses = [address for members in fleet.members.values() for address in members]
        channels = {address: grpc.aio.insecure_channel(address, options=options) for address in addresses}
        try:
            yield Watched(fleet, channels)
        finally:
            await asyncio.gather(*(channel.close() for channel in channels.values()))


async def one_encoder_for_one_picture(w: Watched) -> str:
    """Returns its address."""
    for _ in range(10):
        await w.tokens(about(1))
    encoded = await w.encoded()
    assert sorted(encoded.values()) == [0, 1]
    return max(encoded, key=lambda address: encoded[address])


async def an_encoder_is_killed_under_load(w: Watched, victim: str) -> None:
    gate, answered, enough = asyncio.Semaphore(8), 0, asyncio.Event()

    async def one(seed: int) -> list[int]:
        nonlocal answered
        async with gate:
            tokens = await w.tokens(about(seed))
            answered += 1
            if answered == 12:
                w.fleet.members["encoder"][victim].kill()
                enough.set()
        return tokens

    answers = await asyncio.gather(*(one(seed) for seed in range(100, 148)))
    assert enough.is_set() and await w.ends("encoder", victim) < 0
    assert len(answers) == 48 and all(len(tokens) == 4 for tokens in answers)
    for seed in (100, 120, 147):  # whoever encoded it
        assert await w.tokens(about(seed)) == answers[seed - 100]


async def a_language_model_is_killed_in_the_middle(w: Watched) -> str:
    """Returns its address."""
    victim = await w.in_the_middle(lambda llm: w.fleet.members["llm"][llm].kill())
    assert await w.ends("llm", victim) < 0
    return victim


async def one_of_each_is_drained(w: Watched) -> None:
    encoder = next(iter(w.encoders))
    more: list[asyncio.Task[list[int]]] = []

    def drain(llm: str) -> None:
        w.fleet.members["llm"][llm].terminate()
        w.fleet.members["encoder"][encoder].terminate()
        more.extend(asyncio.create_task(w.tokens(about(seed))) for seed in range(200, 212))

    llm = await w.in_the_middle(drain)
    assert all(len(answer) == 4 for answer in await asyncio.gather(*more))
    assert [await w.ends("llm", llm), await w.ends("encoder", encoder)] == [0, 0]


@pytest.mark.asyncio
async def test_servers_go_and_come_back_while_requests_run(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    async with watched(checkpoint_dir("qwen2_vl"), tmp_path) as w:
        encoder = await one_encoder_for_one_picture(w)
        await an_encoder_is_killed_under_load(w, encoder)
        llm = await a_language_model_is_killed_in_the_middle(w)
        await w.idle()
        await asyncio.to_thread(w.fleet.restart, "encoder", encoder)
        await asyncio.to_thread(w.fleet.restart, "llm", llm)
        await w.used_again("encoder", encoder)
        await w.used_again("llm", llm)
        await one_of_each_is_drained(w)
        await w.idle()
