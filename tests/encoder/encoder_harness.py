"""An encoder service in this process behind a real gRPC server, a client for it, and pictures to send."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from PIL import Image

from services.common.channel import open_channel
from services.common.errors import ServiceError
from services.common.interceptor import ServiceInterceptor
from services.common.server import SERVER_OPTIONS
from services.encoder.config import EncoderConfig
from services.encoder.preprocess import Prepared, Preprocessor
from services.encoder.service import EncoderService
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Modality
from services.models.wire import from_chunk
from tests.media_files import file_bytes
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc


def image_preprocessor(checkpoint: Checkpoint) -> Callable[[Image.Image], Prepared]:
    """Prepares pictures that are alone in their request."""
    preprocess = Preprocessor(checkpoint, [Modality.IMAGE])
    return lambda image: preprocess(np.array(image), checkpoint.plan_image(*image.size))


@dataclass
class Fetched:
    """What came for one item; chunks are (feature, first row, rows)."""

    header: encoder_pb2.ItemHeader | None = None
    chunks: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    done: encoder_pb2.ItemDone | None = None
    error: ServiceError | None = None

    def rows(self, feature: int = 0) -> torch.Tensor:
        """The rows of a feature in the order of arrival, checked to be consecutive."""
        parts = [(start, rows) for index, start, rows in self.chunks if index == feature]
        for (start, rows), (following, _) in itertools.pairwise(parts):
            assert start + rows.shape[0] == following
        return torch.cat([rows for _, rows in parts])


class Client:
    def __init__(self, service: EncoderService, address: str, channel: grpc.aio.Channel, config: EncoderConfig) -> None:
        self.service = service
        self.address = address
        self.stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        self.checkpoint = open_checkpoint(config.model)

    async def encode(self, data: bytes, rows: int, grid: media_pb2.Grid | None = None, **changes: Any) -> str:
        request = {
            "modality": media_pb2.MODALITY_IMAGE,
            "data": data,
            "expected_rows": rows,
            "expected_grid": grid,
            "field": "parts[0].image",
        }
        response = await self.stub.Encode(encoder_pb2.EncodeRequest(**(request | changes)))
        return response.ref_id

    async def encode_picture(self, image: Image.Image, **changes: Any) -> str:
        plan = self.checkpoint.plan_image(*image.size)
        grid = media_pb2.Grid(t=plan.grid.t, h=plan.grid.h, w=plan.grid.w)
        return await self.encode(file_bytes(image), plan.rows, grid, patches=plan.patches, **changes)

    async def fetch(self, *refs: str | tuple[str, int], **options: Any) -> list[Fetched]:
        items = [ref if isinstance(ref, tuple) else (ref, 0) for ref in refs]
        results = [Fetched() for _ in items]
        async for index, event in self.events(items, **options):
            results[index] = add(results[index], event)
        return results

    async def events(
        self, items: Sequence[tuple[str, int]], **options: Any
    ) -> AsyncIterator[tuple[int, encoder_pb2.FetchResponse]]:
        wanted = [encoder_pb2.FetchItem(ref_id=ref, start_row=row) for ref, row in items]
        async for response in self.stub.Fetch(encoder_pb2.FetchRequest(items=wanted, **options), timeout=30):
            yield response.item, response

    async def release(self, *refs: str) -> None:
        await self.stub.Release(encoder_pb2.ReleaseRequest(ref_ids=refs))

    async def load(self) -> encoder_pb2.GetLoadResponse:
        return await self.stub.GetLoad(encoder_pb2.GetLoadRequest())

    async def wait_until(self, condition: Any) -> encoder_pb2.GetLoadResponse:
        """The first load for which the condition holds."""
        for _ in range(int(PATIENCE / 0.02)):
            load = await self.load()
            if condition(load):
                return load
            await asyncio.sleep(0.02)
        raise AssertionError(f"the load stays at {load}")


def add(result: Fetched, response: encoder_pb2.FetchResponse) -> Fetched:
    assert result.done is None and result.error is None, "nothing follows the end of an item"
    match response.WhichOneof("event"):
        case "header":
            assert result.header is None
            result.header = response.header
        case "chunk":
            assert result.header is not None and response.chunk.rows.total_rows == result.header.rows
            result.chunks.append((response.chunk.feature, response.chunk.rows.row_offset, from_chunk(response.chunk.rows)))
        case "done":
            result.done = response.done
        case "error":
            result.error = ServiceError.from_proto(response.error)
    return result


class FakeReadiness:
    ready = False

    async def set(self, ready: bool) -> None:
        self.ready = ready


@asynccontextmanager
async def running(model: Path | str, **options: Any) -> AsyncIterator[Client]:
    """A started encoder; the store's totals are checked at the end."""
    config = EncoderConfig(model=str(model), **{"device": "cpu", **options})
    service = EncoderService(config)
    server = grpc.aio.server(interceptors=[ServiceInterceptor()], options=SERVER_OPTIONS)
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    readiness = FakeReadiness()
    await service.start(readiness, f"127.0.0.1:{port}")  # type: ignore[arg-type]
    assert readiness.ready
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield Client(service, f"127.0.0.1:{port}", channel, config)
        service.store.check_integrity()
    finally:
        await channel.close()
        await server.stop(0)
        await service.stop()


def error_of(error: grpc.aio.AioRpcError) -> ServiceError:
    return ServiceError.from_rpc(error, "encoder")
