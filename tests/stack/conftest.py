"""Real stacks: gateway, encoder and language model as processes, one per family, and what they say of themselves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.local_stack import LocalStack, local_stack
from tests.patience import PATIENCE
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

IDLE = ("running_requests", "queued_requests", "reserved_kv_blocks", "pending_items", "refs", "held_bytes")
IDLE_LLM = ("running_sequences", "waiting_sequences")


@dataclass(frozen=True)
class Loads:
    """One look at all three services."""

    gateway: gateway_pb2.GetLoadResponse
    encoder: encoder_pb2.GetLoadResponse
    llm: llm_pb2.GetLoadResponse

    def busy(self) -> dict[str, int]:
        """Every figure that should be zero when nothing runs, and is not."""
        figures = {name: getattr(side, name) for side in (self.gateway, self.encoder) for name in IDLE if hasattr(side, name)}
        figures |= {name: getattr(self.llm, name) for name in IDLE_LLM}
        figures["used_blocks"] = self.llm.total_blocks - self.llm.free_blocks
        return {name: value for name, value in figures.items() if value}

    def tasks(self) -> tuple[int, int, int]:
        return self.gateway.tasks, self.encoder.tasks, self.llm.tasks


@dataclass(frozen=True)
class RunningStack:
    """A stack and where its parts are."""

    stack: LocalStack
    log_dir: Path

    @property
    def address(self) -> str:
        return self.stack.address

    def events(self, service: str) -> list[dict[str, Any]]:
        """The service's log lines so far."""
        lines = (self.log_dir / f"{service}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def serving(self, service: str) -> dict[str, Any]:
        """Its "serving" line: address and pid."""
        return next(e for e in self.events(service) if e["event"] == "serving")

    def wait_until_encoder_is_known(self) -> None:
        """Its gateway answers text before it has heard of its encoder: for a moment, or longer where the machine stands still."""
        deadline = time.monotonic() + PATIENCE
        while not any(e["event"] == "encoder ready" for e in self.events("gateway")):
            assert time.monotonic() < deadline, "the gateway has not heard of its encoder"

    def loads(self) -> Loads:
        with ExitStack() as stack:
            gateway, encoder, llm = (
                stack.enter_context(grpc.insecure_channel(self.serving(s)["address"])) for s in ("gateway", "encoder", "llm")
            )
            return Loads(
                gateway_pb2_grpc.ChatServiceStub(gateway).GetLoad(gateway_pb2.GetLoadRequest(), timeout=PATIENCE),
                encoder_pb2_grpc.EncoderServiceStub(encoder).GetLoad(encoder_pb2.GetLoadRequest(), timeout=PATIENCE),
                llm_pb2_grpc.LlmServiceStub(llm).GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE),
            )

    def wait_until(self, what: Callable[[Loads], bool]) -> Loads:
        """Look until it is so; fails with the figures when time is up."""
        deadline = time.monotonic() + PATIENCE
        while True:
            loads = self.loads()
            if what(loads):
                return loads
            assert time.monotonic() < deadline, f"still busy after {PATIENCE:g} s: {loads.busy()}, tasks {loads.tasks()}"

    async def tokens(self, request: gateway_pb2.ChatRequest) -> tuple[list[int], list[gateway_pb2.ChatResponse]]:
        """Every token of an answer, and the whole stream."""
        async with grpc.aio.insecure_channel(self.address, [("grpc.max_send_message_length", -1)]) as channel:
            stream = gateway_pb2_grpc.ChatServiceStub(channel).Chat(request, timeout=120)
            responses = [response async for response in stream]
        return [t for r in responses for t in r.delta.token_ids], responses

    @asynccontextmanager
    async def answering(self, request: gateway_pb2.ChatRequest) -> AsyncIterator[None]:
        """While the block runs an answer goes on: it has begun before the block, and is cancelled after it."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stream = gateway_pb2_grpc.ChatServiceStub(channel).Chat(request, timeout=120)
            async for response in stream:
                if response.HasField("delta"):
                    break
            try:
                yield
            finally:
                stream.cancel()


@pytest.fixture(scope="module")
def start_stack(
    checkpoint_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], RunningStack]]:
    """``start_stack("llava")`` is a running stack in float32, shared by a file's tests; a stack takes up to 2 GB."""
    running: dict[str, RunningStack] = {}
    with ExitStack() as stacks:

        def start(family: str) -> RunningStack:
            if family not in running:
                logs = tmp_path_factory.mktemp(f"logs-{family}")
                model = str(checkpoint_dir(family))
                stack = stacks.enter_context(local_stack("--model", model, "--dtype", "float32", log_dir=logs, quiet=True))
                running[family] = RunningStack(stack, logs)
                running[family].wait_until_encoder_is_known()
            assert running[family].stack.process.poll() is None, f"an earlier test ended the stack; see {running[family].log_dir}"
            return running[family]

        yield start


def gather_limited(limit: int) -> Callable[[Any], Any]:
    """Run a coroutine with at most ``limit`` of its kind at once."""
    gate = asyncio.Semaphore(limit)

    async def run(coroutine: Any) -> Any:
        async with gate:
            return await coroutine

    return run
