"""The service over gRPC, in this process: calls that a gateway would never make, and what becomes of the others."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from services.common.errors import ServiceError
from services.common.interceptor import ServiceInterceptor
from services.llm.config import LlmConfig
from services.llm.logprobs import Choice
from services.llm.sampler import TokenChooser, choose
from services.llm.service import LlmService
from services.models.media import Modality
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

Dirs = Callable[[str], Path]
CODE = grpc.StatusCode
NOWHERE = media_pb2.EmbeddingRef(id="x", encoder_address="127.0.0.1:1")


class FakeReadiness:
    alive = True

    async def set(self, ready: bool) -> None: ...


@dataclass
class Client:
    service: LlmService
    stub: Any

    def generate(self, name: str, tokens: list[int], *spans: media_pb2.Span, **sampling: Any) -> Any:
        params = sampling_pb2.SamplingParams(**({"max_tokens": 2} | sampling))
        request = llm_pb2.GenerateRequest(request_id=name, token_ids=tokens, spans=spans, sampling=params)
        return self.stub.Generate(request, timeout=20)

    async def tokens(self, call: Any) -> list[int]:
        return [token async for response in call for token in response.delta.token_ids]

    async def serves(self) -> None:
        assert [r.WhichOneof("event") async for r in self.generate("good", [5, 6, 7])][-1] == "done"

    async def refused(self, call: Any) -> ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        await self.serves()
        return ServiceError.from_rpc(caught.value, "language model")


@asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[Client]:
    service = LlmService(LlmConfig(model=str(path), dtype="float32", kv_cache_memory_bytes=16 << 20, **options))
    server = grpc.aio.server(interceptors=[ServiceInterceptor(service.open_while_draining)])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start(FakeReadiness(), "")  # type: ignore[arg-type]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(service, llm_pb2_grpc.LlmServiceStub(channel))
    finally:
        await server.stop(0)
        await service.stop()


@pytest.mark.asyncio
async def test_a_stop_token_that_does_not_exist(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llama")) as client:
        error = await client.refused(client.generate("odd", [1, 2], stop_token_ids=[1_000_000], min_tokens=2))
        assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, "sampling.stop_token_ids")


@pytest.mark.asyncio
async def test_more_answers_than_sequences_run_at_once(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llama"), max_num_seqs=2) as client:
        error = await client.refused(client.generate("odd", [1, 2], n=3))
        assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, "sampling.n") and "at most 2" in error.message


@pytest.mark.asyncio
@pytest.mark.parametrize("grid", [(0, 0, 0), (1, 8, 8), (1, 16, 1), (1, 4_294_967_294, 4_294_967_294)])
async def test_a_grid_that_is_not_that_of_the_rows(checkpoint_dir: Dirs, grid: tuple[int, int, int]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        image = client.service.servicer.checkpoint.placeholder_id(Modality.IMAGE)
        t, h, w = grid
        span = media_pb2.Span(modality=1, offset=1, rows=4, grid=media_pb2.Grid(t=t, h=h, w=w), ref=NOWHERE)
        error = await client.refused(client.generate("odd", [5, *[image] * 4, 6], span))
        assert (error.code, error.field) == (CODE.INVALID_ARGUMENT, "spans[0].grid")


@pytest.mark.asyncio
async def test_abort_ends_the_call_and_reports_it(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llama")) as client:
        call = client.generate("long", [1, 2], max_tokens=8000, ignore_eos=True)
        events = aiter(call)
        await anext(events)
        await client.stub.Abort(llm_pb2.AbortRequest(request_id="long"))
        await client.stub.Abort(llm_pb2.AbortRequest(request_id="long"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(PATIENCE):
                async for _ in events:
                    pass
        assert caught.value.code() is CODE.CANCELLED and "Abort" in str(caught.value.details())
        await client.serves()


@pytest.mark.asyncio
async def test_cancelled_calls_leave_no_task_behind(checkpoint_dir: Dirs, caplog: pytest.LogCaptureFixture) -> None:
    async with running(checkpoint_dir("llama")) as client:
        await client.serves()
        before = len(asyncio.all_tasks())
        for index in range(20):
            call = client.generate(f"c{index}", [1] * 300, max_tokens=300, ignore_eos=True)
            await asyncio.sleep(0.003 * index)
            call.cancel()
        async with asyncio.timeout(PATIENCE):
            while len(asyncio.all_tasks()) > before or client.service.engine.scheduler.running:
                await asyncio.sleep(0.01)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.asyncio
async def test_a_fetch_that_fails_while_it_is_cancelled_is_no_error(
    checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        ended = asyncio.Event()

        async def fetch(*_args: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
                raise ServiceError(CODE.UNAVAILABLE, "the encoder went away in the same moment")

        monkeypatch.setattr(client.service.fetcher, "fetch", fetch)
        image = client.service.servicer.checkpoint.placeholder_id(Modality.IMAGE)
        span = media_pb2.Span(modality=1, offset=1, rows=4, grid=media_pb2.Grid(t=1, h=4, w=4), ref=NOWHERE)
        call = client.generate("odd", [5, *[image] * 4, 6], span)
        assert (await call.read()).HasField("admitted")
        call.cancel()
        await asyncio.wait_for(ended.wait(), PATIENCE)
        await client.serves()
        gc.collect()  # where asyncio complains of errors that nobody looked at
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.asyncio
async def test_a_token_that_cannot_be_chosen_fails_its_own_request_only(
    checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(choosers: Sequence[TokenChooser], logits: torch.Tensor) -> list[Choice | None]:
        if any(chooser.sampling.seed == 13 for chooser in choosers):
            raise IndexError("no such token")
        return choose(choosers, logits)

    monkeypatch.setattr("services.llm.engine.choose", odd)
    async with running(checkpoint_dir("llama")) as client:
        other = asyncio.create_task(client.tokens(client.generate("well", [1, 2], max_tokens=20, ignore_eos=True)))
        error = await client.refused(client.generate("odd", [1, 2], seed=13))
        assert len(await other) == 20
        assert error.code is CODE.INTERNAL and "no such token" not in error.message


@pytest.mark.asyncio
async def test_a_constraint_that_becomes_too_complex_ends_its_own_request_only(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llama")) as client:
        other = asyncio.create_task(client.tokens(client.generate("well", [1, 2], max_tokens=40, regex="[a-z]{1000}")))
        # Each letter gives more ways to read the text than the one before, and there is no other text.
        grammar = 'start: s "b"\ns: s s s s s | s s s | s s | "a"'
        a = client.service.servicer.grammars._tokenizer.tokenize_str("a")[0]
        error = await client.refused(client.generate("odd", [1, 2], max_tokens=1000, grammar=grammar, logit_bias={a: 100}))
        assert len(await other) == 40
        assert error.code is CODE.INVALID_ARGUMENT and error.field == "sampling.grammar"
        assert "too complex" in error.message and "max is 1000" in error.message


@pytest.mark.asyncio
async def test_a_service_stops_in_the_middle_of_constrained_answers(
    checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(checkpoint_dir("llama")) as client:
        died: list[bool] = []
        monkeypatch.setattr(client.service.engine, "_died", lambda: died.append(True))
        calls = [client.generate(f"c{i}", [1, 2], max_tokens=2000, regex="[a-z]{4000}") for i in range(3)]
        for call in calls:
            async for response in call:
                if response.WhichOneof("event") == "delta":
                    break
        await client.service.stop()
        assert not died and not [r for r in caplog.records if r.levelno >= logging.ERROR]
        for call in calls:
            call.cancel()


@pytest.mark.asyncio
async def test_a_step_that_fails_names_its_requests_in_the_log(
    checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(checkpoint_dir("llama")) as client:
        run = client.service.engine.runner.run

        def fail_once(*arguments: Any) -> None:
            monkeypatch.setattr(client.service.engine.runner, "run", run)
            raise MemoryError("no room for 7 numbers")

        monkeypatch.setattr(client.service.engine.runner, "run", fail_once)
        error = await client.refused(client.generate("odd", [1, 2], n=2))
        assert error.code is CODE.INTERNAL and "7 numbers" not in error.message
        client.service.engine.scheduler.check_integrity()
    (line,) = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name == "services.llm.engine"]
    assert line.fields == {"requests": ["odd"]}  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_an_engine_that_dies_says_so(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(checkpoint_dir("llama")) as client:
        engine, died = client.service.engine, asyncio.Event()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(engine, "_died", lambda: loop.call_soon_threadsafe(died.set))
        monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        call = client.generate("last", [1, 2])
        await asyncio.wait_for(died.wait(), PATIENCE)
        call.cancel()
