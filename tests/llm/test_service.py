"""LlmService over real gRPC: what it refuses, and what a lying, broken or absent encoder does to one request alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import pytest
import torch

from services.common.interceptor import ServiceInterceptor
from services.common.server import SERVER_OPTIONS
from services.llm.config import LlmConfig
from services.llm.service import LlmService
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Modality
from services.models.wire import wire_dtype
from tests.chunks import to_chunk
from tests.patience import PATIENCE
from triptych.common.v1 import error_pb2, media_pb2, sampling_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

ROWS, GRID = 4, media_pb2.Grid(t=1, h=4, w=4)
BEFORE = [5, 6, 7]


class FakeReadiness:
    alive = True

    async def set(self, ready: bool) -> None:
        self.ready = ready


@dataclass
class FakeEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Streams ``rows``; the knobs make it lie or break."""

    fingerprint: str
    rows: torch.Tensor
    announced: int = ROWS
    damaged: bool = False
    breaks: int = 0  # streams that end with UNAVAILABLE after half the rows
    hold: asyncio.Event | None = None
    starts: list[int] = field(default_factory=list)

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[encoder_pb2.FetchResponse]:
        if self.hold is not None:
            await self.hold.wait()
        start = request.items[0].start_row
        self.starts.append(start)
        feature = encoder_pb2.Feature(hidden_size=self.rows.shape[1], dtype=wire_dtype(self.rows.dtype))
        header = encoder_pb2.ItemHeader(rows=self.announced, grid=GRID, features=[feature], model_fingerprint=self.fingerprint)
        yield encoder_pb2.FetchResponse(header=header)
        for row in range(start, len(self.rows)):
            if self.breaks and row == ROWS // 2:
                self.breaks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            chunk = to_chunk(self.rows[row : row + 1], row, len(self.rows))
            if self.damaged:
                chunk.xxh3 ^= 1
            yield encoder_pb2.FetchResponse(chunk=encoder_pb2.ItemChunk(rows=chunk))
        yield encoder_pb2.FetchResponse(done=encoder_pb2.ItemDone(preprocess_seconds=0.25, encode_seconds=0.5))


@dataclass
class Running:
    """A service behind a server."""

    service: LlmService
    stub: llm_pb2_grpc.LlmServiceStub
    checkpoint: Checkpoint

    @property
    def image(self) -> int:
        return self.checkpoint.placeholder_id(Modality.IMAGE)

    def request(self, name: str = "r", *, encoder: str = "", **changes: Any) -> llm_pb2.GenerateRequest:
        """Three words, an image where an encoder is named, one word; greedy."""
        sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        fields: dict[str, Any] = {"request_id": name, "token_ids": [*BEFORE, 8], "sampling": sampling}
        if encoder:
            fields |= {"token_ids": [*BEFORE, *[self.image] * ROWS, 8], "spans": [span(encoder)]}
        return llm_pb2.GenerateRequest(**(fields | changes))

    async def tokens(self, request: llm_pb2.GenerateRequest, timeout: float = 20) -> list[int]:
        return [t async for r in self.stub.Generate(request, timeout=timeout) for t in r.delta.token_ids]

    async def error(self, request: llm_pb2.GenerateRequest, timeout: float = 20) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.tokens(request, timeout)
        assert "0x" not in str(raised.value.details())
        return raised.value

    async def check_free(self) -> None:
        """A good request works, and everything is free again."""
        assert len(await self.tokens(self.request("good"))) == 3
        load = await self.stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE)
        assert (load.running_sequences, load.waiting_sequences, load.free_blocks) == (0, 0, load.total_blocks)


def span(encoder: str, offset: int = len(BEFORE), rows: int = ROWS, modality: int = 1) -> media_pb2.Span:
    ref = media_pb2.EmbeddingRef(id="ref", encoder_address=encoder)
    grid = media_pb2.Grid(t=1, h=2, w=2 * rows)
    return media_pb2.Span(modality=modality, offset=offset, rows=rows, grid=grid, digest=b"d" * 32, ref=ref)  # type: ignore[arg-type]


def wrong_grid(given: media_pb2.Span) -> media_pb2.Span:
    given.grid.w += 2
    return given


@asynccontextmanager
async def serve(add: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ServiceInterceptor()], options=SERVER_OPTIONS)
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[Running]:
    config = LlmConfig(
        model=str(path), dtype="float32", device="cpu", kv_cache_memory_bytes=16 << 20, max_model_len=256, **options
    )
    service = LlmService(config)
    await service.start(FakeReadiness(), "")  # type: ignore[arg-type]
    try:
        async with (
            serve(llm_pb2_grpc.add_LlmServiceServicer_to_server, service.servicer) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            yield Running(service, llm_pb2_grpc.LlmServiceStub(channel), open_checkpoint(str(path)))
    finally:
        await service.stop()


def good_encoder(llm: Running) -> FakeEncoder:
    rows = torch.randn(ROWS, llm.service.engine.runner.hidden_size, generator=torch.Generator().manual_seed(1))
    return FakeEncoder(llm.checkpoint.fingerprint, rows)


def encoder(fake: FakeEncoder) -> Any:
    return serve(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, fake)


@asynccontextmanager
async def withheld(path: Path) -> AsyncIterator[tuple[Running, str, asyncio.Event]]:
    """A service, and the address of an encoder that sends nothing until the event is set."""
    async with running(path) as llm:
        fake = good_encoder(llm)
        fake.hold = asyncio.Event()
        async with encoder(fake) as address:
            yield llm, address, fake.hold


@pytest.mark.asyncio
async def test_bad_requests_name_the_field(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as llm:
        far, image = "127.0.0.1:1", llm.image
        ids = [*BEFORE, *[image] * ROWS, 8]
        sampling = sampling_pb2.SamplingParams
        for changes, words in (
            ({"request_id": ""}, ["request_id", "128"]),
            ({"request_id": "x" * 129}, ["request_id", "128"]),
            ({"token_ids": []}, ["token_ids", "empty"]),
            ({"token_ids": [1, 10**6]}, ["token_ids", "vocabulary"]),
            ({"token_ids": ids}, ["spans", "4 placeholder tokens"]),
            ({"token_ids": [*ids, image], "spans": [span(far)]}, ["spans", "1 placeholder"]),
            ({"token_ids": ids, "spans": [wrong_grid(span(far))]}, ["spans[0].grid", "4 rows"]),
            ({"token_ids": ids, "spans": [span(far, offset=2)]}, ["spans[0]", "placeholder"]),
            ({"token_ids": ids, "spans": [span(far, rows=99)]}, ["spans[0]", "8 tokens"]),
            ({"token_ids": ids, "spans": [span(far, rows=2), span(far, offset=4, rows=3)]}, ["spans[1]", "5"]),
            ({"token_ids": ids, "spans": [span("")]}, ["spans[0].ref"]),
            ({"token_ids": ids, "spans": [span(far, modality=2)]}, ["spans[0].modality"]),
            ({"sampling": sampling(max_tokens=10**6)}, ["256", "1000000"]),
            ({"sampling": sampling(max_tokens=0)}, ["max_tokens", "1"]),
            ({"sampling": sampling(max_tokens=3, temperature=3)}, ["temperature", "2"]),
            ({"sampling": sampling(max_tokens=3, top_p=0)}, ["top_p"]),
            ({"sampling": sampling(max_tokens=3, min_p=2)}, ["min_p"]),
        ):
            error = await llm.error(llm.request(**changes))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, changes
            assert all(word in str(error.details()) for word in words), (changes, error.details())
        await llm.check_free()


@pytest.mark.asyncio
async def test_an_id_runs_once_at_a_time(checkpoint_dir: Callable[[str], Path]) -> None:
    async with withheld(checkpoint_dir("qwen2_vl")) as (llm, address, _):
        first = llm.stub.Generate(llm.request("same", encoder=address), timeout=20)
        assert (await first.read()).HasField("admitted")
        assert (await llm.error(llm.request("same"))).code() == grpc.StatusCode.ALREADY_EXISTS
        await llm.stub.Abort(llm_pb2.AbortRequest(request_id="same"), timeout=5)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await first.read()
        await llm.stub.Abort(llm_pb2.AbortRequest(request_id="same"), timeout=5)
        await llm.check_free()


@pytest.mark.asyncio
async def test_text_goes_on_while_rows_are_withheld(checkpoint_dir: Callable[[str], Path]) -> None:
    async with withheld(checkpoint_dir("qwen2_vl")) as (llm, address, release):
        waiting = asyncio.create_task(llm.tokens(llm.request("picture", encoder=address)))
        assert len(await llm.tokens(llm.request("text"))) == 3
        assert not waiting.done()
        release.set()
        assert len(await waiting) == 3


@pytest.mark.asyncio
async def test_a_broken_stream_resumes_at_the_next_row(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as llm:
        fake = good_encoder(llm)
        async with encoder(fake) as address:
            whole = await llm.tokens(llm.request("whole", encoder=address))
            fake.breaks = 1
            assert await llm.tokens(llm.request("broken", encoder=address)) == whole
            assert fake.starts == [0, 0, ROWS // 2]


@pytest.mark.asyncio
async def test_stage_times_add_up(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as llm, encoder(good_encoder(llm)) as address:
        stream = llm.stub.Generate(llm.request(encoder=address), timeout=20)
        done = [r async for r in stream][-1].done
        assert (done.stage_times.preprocess, done.stage_times.encode) == (0.25, 0.5)
        assert done.stage_times.HasField("wait_for_rows") and done.stage_times.prefill > 0
        assert done.completion_tokens == 3


@pytest.mark.asyncio
async def test_an_encoder_that_lies_or_is_away_fails_its_request_only(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as llm:
        hidden = llm.service.engine.runner.hidden_size

        async def refused(code: grpc.StatusCode, reason: str, **lie: Any) -> None:
            fake = good_encoder(llm)
            for name, value in lie.items():
                setattr(fake, name, value)
            async with encoder(fake) as address:
                error = await llm.error(llm.request(encoder=address))
            assert error.code() == code, (lie, error)
            details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
            status = error_pb2.ErrorStatus.FromString(details)  # type: ignore[arg-type]
            assert not reason or reason.encode() in status.SerializeToString(), lie
            await llm.check_free()

        await refused(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH", fingerprint="other")
        await refused(grpc.StatusCode.INTERNAL, "ESTIMATE_MISMATCH", announced=ROWS + 1)
        await refused(grpc.StatusCode.INTERNAL, "ESTIMATE_MISMATCH", rows=torch.zeros(ROWS - 1, hidden))
        await refused(grpc.StatusCode.INTERNAL, "ESTIMATE_MISMATCH", rows=torch.zeros(ROWS + 1, hidden))
        await refused(grpc.StatusCode.INTERNAL, "ESTIMATE_MISMATCH", rows=torch.zeros(ROWS, hidden * 2))
        await refused(grpc.StatusCode.DATA_LOSS, "", damaged=True)
        await refused(grpc.StatusCode.UNAVAILABLE, "ENCODER_LOST", breaks=99)
        error = await llm.error(llm.request(encoder="127.0.0.1:1"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        await llm.check_free()


@pytest.mark.asyncio
async def test_channels_to_encoders_of_the_past_are_closed(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as llm, encoder(good_encoder(llm)) as address:
        fetcher = llm.service.fetcher
        for port in range(1, 21):
            error = await llm.error(llm.request(encoder=f"127.0.0.1:{port}"))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert len(fetcher._channels) == 16 and "127.0.0.1:20" in fetcher._channels
        assert len(await llm.tokens(llm.request(encoder=address))) == 3
        assert len(fetcher._channels) == 16 and address in fetcher._channels and not any(fetcher._users.values())


@pytest.mark.asyncio
async def test_rows_that_never_come_end_with_the_deadline(checkpoint_dir: Callable[[str], Path]) -> None:
    async with withheld(checkpoint_dir("qwen2_vl")) as (llm, address, release):
        error = await llm.error(llm.request(encoder=address), timeout=1)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await llm.check_free()
        release.set()


@pytest.mark.asyncio
async def test_a_prompt_that_comes_again_is_found_and_counted(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as client:
        words = list(range(5, 55))
        first, again = [
            [r.done async for r in client.stub.Generate(client.request(name, token_ids=words), timeout=20) if r.HasField("done")]
            for name in ("first", "again")
        ]
        assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 48)
        load = await client.stub.GetLoad(llm_pb2.GetLoadRequest(), timeout=PATIENCE)
        assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (100, 48)
        assert load.cached_blocks == 3 and load.free_blocks == load.total_blocks
        page = prometheus_client.generate_latest().decode()
        for line in ("triptych_llm_prefix_hit_tokens_total 48.0", "triptych_llm_generated_tokens_total 6.0"):
            assert line in page
        assert 'triptych_llm_kv_blocks{group="full",state="cached"} 3.0' in page
    assert "triptych_llm_steps" not in prometheus_client.generate_latest().decode()


@pytest.mark.asyncio
async def test_an_answer_that_needs_no_rows_does_not_wait_for_them(checkpoint_dir: Callable[[str], Path]) -> None:
    async with withheld(checkpoint_dir("qwen2_vl")) as (llm, address, release):

        def again(name: str) -> llm_pb2.GenerateRequest:
            return llm.request(name, encoder=address, token_ids=[*BEFORE, *[llm.image] * ROWS, *range(20, 40)])

        release.set()
        first = await llm.tokens(again("first"))
        release.clear()
        assert await llm.tokens(again("again"), timeout=5) == first
        await llm.check_free()


@pytest.mark.asyncio
async def test_a_placeholder_that_has_no_logit_is_read_penalized_and_scored(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("mllama")) as llm:
        runner, fake = llm.service.engine.runner, good_encoder(llm)
        assert llm.image == runner.vocab_size
        fake.announced = runner.merger.cross_rows
        fake.rows = torch.zeros(fake.announced, runner.hidden_size)
        sampling = sampling_pb2.SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.3, prompt_logprobs=2)
        async with encoder(fake) as address:
            picture = span(address, rows=fake.announced)
            picture.grid.CopyFrom(media_pb2.Grid(t=1, h=1, w=1))
            prompt = [*BEFORE, llm.image, 8]
            request = llm.request(token_ids=prompt, spans=[picture], sampling=sampling)
            deltas = [r.delta async for r in llm.stub.Generate(request, timeout=20) if r.HasField("delta")]
        assert [scored.token_id for scored in deltas[0].prompt_logprobs.tokens] == prompt[1:]
        assert sum(len(delta.token_ids) for delta in deltas) == 3
        error = await llm.error(llm.request(token_ids=[*BEFORE, llm.image + 1]))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "token_ids" in str(error.details())
        await llm.check_free()


@pytest.mark.asyncio
async def test_more_requests_than_may_be_held_are_told_to_come_back(
    checkpoint_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(checkpoint_dir("llama"), max_requests=1) as llm:
        runner, go_on = llm.service.engine.runner, threading.Event()
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda *step: run(*step) if go_on.wait(PATIENCE) else None)
        call = llm.stub.Generate(llm.request("first"))
        reading = asyncio.create_task(anext(aiter(call)))
        while not llm.service.servicer._active:
            await asyncio.sleep(0)
        error = await llm.error(llm.request("second"))
        go_on.set()
        await reading
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "--max-requests" in str(error.details())
        call.cancel()
        while llm.service.servicer._active:
            await asyncio.sleep(0)
        await llm.check_free()


@pytest.mark.asyncio
async def test_requests_without_a_seed_differ_and_those_with_one_agree(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as llm:

        async def drawn(name: str, **seed: int) -> list[int]:
            sampling = sampling_pb2.SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, **seed)
            return await llm.tokens(llm.request(name, sampling=sampling))

        free = [await drawn(f"free{i}") for i in range(3)]
        assert len({tuple(tokens) for tokens in free}) == 3
        assert await drawn("a", seed=7) == await drawn("b", seed=7)


@pytest.mark.asyncio
async def test_a_constrained_answer_goes_on_in_its_form(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as llm:
        sampling = sampling_pb2.SamplingParams(max_tokens=24, temperature=1.0, seed=3, regex="([a-z]{3}[0-9]{2}){1,9}")
        whole = await llm.tokens(llm.request(token_ids=BEFORE, spans=[], sampling=sampling))
        for begun in range(1, len(whole), 3):
            rest = llm.request(token_ids=BEFORE, spans=[], sampling=sampling, answer_token_ids=whole[:begun])
            assert await llm.tokens(rest) == whole[begun:]
