"""An encoder and a language model behind real gRPC: rows of a piece are prefilled while the next one is still to be encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from encoder_harness import Client, FakeReadiness, Fetched, add, image_preprocessor, running
from PIL import Image

from services.common.interceptor import ServiceInterceptor
from services.encoder.towers import Towers
from services.llm.config import LlmConfig
from services.llm.service import LlmService
from services.models.checkpoint import open_checkpoint
from services.models.media import ItemPlan, Modality
from tests.media_files import picture
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

pytestmark = pytest.mark.asyncio
WIDTH, HEIGHT = 420, 130  # four tiles of 1024 patches in both families; each is a piece
TILES = 4
TEXT = 7  # a token


@dataclass
class Gate:
    """Lets the towers through piece by piece, and sees how far the language model has come meanwhile.

    Attributes:
        encoded: pieces that are through the towers.
        computed: prompt tokens whose keys and values the language model has.
    """

    encoder: Client
    llm: LlmService
    shut: bool = True
    encoded: int = 0
    computed: int = 0
    places: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        pipeline = self.encoder.service.servicer.pipeline
        assert pipeline is not None
        encode, commit = pipeline._batcher._encode, self.llm.engine.scheduler.commit

        def gated(batch: Sequence[Any]) -> Any:
            assert not self.shut or self.places.acquire(timeout=60)
            features = encode(batch)
            self.encoded += len(batch)
            return features

        def watched(chunks: list[Any]) -> None:
            commit(chunks)
            self.computed = chunks[0].sequence.computed
            self._loop.call_soon_threadsafe(self._changed.set)

        pipeline._batcher._encode = gated
        self.llm.engine.scheduler.commit = watched  # type: ignore[method-assign]

    async def prefilled(self, tokens: int) -> None:
        """Until so many tokens are computed."""
        while self.computed < tokens:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)

    def open(self) -> None:
        self.shut = False
        self.places.release(100)


@asynccontextmanager
async def language_model(path: Path) -> AsyncIterator[tuple[LlmService, llm_pb2_grpc.LlmServiceStub]]:
    config = LlmConfig(
        model=str(path), dtype="float32", device="cpu", kv_cache_memory_bytes=16 << 20, max_model_len=2048,
        enable_prefix_caching=False,
    )  # fmt: skip
    service = LlmService(config)
    server = grpc.aio.server(interceptors=[ServiceInterceptor()])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start(FakeReadiness(), "")  # type: ignore[arg-type]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield service, llm_pb2_grpc.LlmServiceStub(channel)
        finally:
            await server.stop(None)
            await service.stop()


def prompt(plan: ItemPlan, placeholder: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids with text before, behind and between the item's runs, and where each run is: (offset, rows)."""
    tokens, runs = [TEXT] * 3, []
    for run in plan.spelling:
        if isinstance(run, int):
            runs.append((len(tokens), run))
            tokens += [placeholder] * run
        else:
            tokens.append(TEXT)
    return [*tokens, TEXT, TEXT], runs


def spans(plan: ItemPlan, runs: list[tuple[int, int]], ref: media_pb2.EmbeddingRef) -> Iterator[media_pb2.Span]:
    first = 0
    for offset, rows in runs:
        yield media_pb2.Span(
            modality=media_pb2.MODALITY_IMAGE, offset=offset, rows=rows, grid=media_pb2.Grid(t=1, h=1, w=rows), ref=ref,
            first_row=first,
        )  # fmt: skip
        first += rows


@pytest.mark.parametrize("family", ["internvl", "smolvlm"])
async def test_a_tile_is_prefilled_before_the_next_one_is_encoded(checkpoint_dir: Callable[[str], Path], family: str) -> None:
    path = checkpoint_dir(family)
    async with running(path, dtype="float32") as encoder, language_model(path) as (llm, stub):
        gate, image = Gate(encoder, llm), picture(WIDTH, HEIGHT)
        plan = encoder.checkpoint.plan_image(WIDTH, HEIGHT)
        tokens, runs = prompt(plan, encoder.checkpoint.placeholder_id(Modality.IMAGE))
        each = plan.rows // TILES
        assert plan.tiles == TILES and (len(runs) == 1 or [rows for _, rows in runs] == [each] * TILES)
        # where the first row of every tile stands, and the end: nothing is computed beyond the first that is not there
        firsts = [offset + at for offset, rows in runs for at in range(0, rows, each)] + [len(tokens)]

        async def answer(name: str) -> list[int]:
            ref = media_pb2.EmbeddingRef(id=await encoder.encode_picture(image), encoder_address=encoder.address)
            sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            request = llm_pb2.GenerateRequest(
                request_id=name, token_ids=tokens, sampling=sampling, spans=list(spans(plan, runs, ref))
            )
            return [t async for r in stub.Generate(request, timeout=120) for t in r.delta.token_ids]

        async with asyncio.TaskGroup() as group:
            gated = group.create_task(answer("gated"))
            for tiles, first in enumerate(firsts[:-1]):
                await gate.prefilled(first)
                assert (gate.encoded, gate.computed) == (tiles, first), "all rows that are there, and none that is not"
                gate.places.release()
        assert len(gated.result()) == 8 and gate.encoded == TILES
        gate.open()
        assert await answer("open") == gated.result()


async def test_two_readers_at_different_rows_of_a_picture_that_is_being_encoded(checkpoint_dir: Callable[[str], Path]) -> None:
    path, image = checkpoint_dir("internvl"), picture(WIDTH, HEIGHT)
    async with running(path, dtype="float32") as encoder, language_model(path) as (llm, _):
        gate = Gate(encoder, llm)
        ref = await encoder.encode_picture(image)
        each = encoder.checkpoint.plan_image(WIDTH, HEIGHT).rows // TILES
        starts = (0, each + 3)
        streams = [encoder.events([(ref, start)]) for start in starts]
        found = [Fetched(), Fetched()]

        async def rows(reader: int, count: int) -> None:
            """Read on until so many rows are there."""
            while sum(len(chunk) for _, _, chunk in found[reader].chunks) < count:
                _, event = await anext(streams[reader])
                found[reader] = add(found[reader], event)

        gate.places.release()
        await rows(0, each)
        gate.places.release()
        await rows(1, each - 3)
        assert gate.encoded == 2 and found[1].chunks[0][1] == starts[1]
        gate.open()
        expected = whole(path, image)
        for reader, start in enumerate(starts):
            await rows(reader, TILES * each - start)
            assert (await anext(streams[reader]))[1].HasField("done")
            assert (found[reader].rows() - expected[start:]).abs().max() < 1e-4


def whole(path: Path, image: Image.Image) -> torch.Tensor:
    """The picture's rows, encoded in one piece."""
    checkpoint = open_checkpoint(str(path))
    ((rows,),) = Towers(checkpoint, "float32", "cpu").encode([image_preprocessor(checkpoint)(image)])
    return rows
