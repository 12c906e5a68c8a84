"""The service over gRPC, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from encoder_harness import Client, error_of, image_preprocessor, running
from prometheus_client import REGISTRY

from services.encoder.batcher import Batcher
from services.encoder.store import Header
from services.encoder.towers import Towers
from services.models.checkpoint import open_checkpoint
from services.models.media import Grid, Look, Picture
from tests.media_files import file_bytes, picture, png_header
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2, tensor_pb2
from triptych.encoder.v1 import encoder_pb2

pytestmark = pytest.mark.asyncio
Dirs = Callable[[str], Path]


@contextmanager
def gate(client: Client) -> Iterator[threading.Event]:
    """Holds every batch before the towers until the event is set, at the latest at the end."""
    pipeline = client.service.servicer.pipeline
    assert pipeline is not None
    event, batcher = threading.Event(), pipeline._batcher
    encode = batcher._encode

    def gated(batch: Any) -> Any:
        assert event.wait(PATIENCE)
        return encode(batch)

    batcher._encode = gated
    try:
        yield event
    finally:
        event.set()


def expected_rows(path: Path, image: Any) -> torch.Tensor:
    checkpoint = open_checkpoint(str(path))
    ((rows,),) = Towers(checkpoint, "float32", "cpu").encode([image_preprocessor(checkpoint)(image)])
    return rows


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
async def test_rows_arrive_with_a_header_and_times(checkpoint_dir: Dirs, family: str) -> None:
    path, image = checkpoint_dir(family), picture(301, 117)
    async with running(path) as client:
        ref = await client.encode_picture(image)
        (item,) = await client.fetch(ref)
        assert item.error is None and item.header is not None and item.done is not None
        plan = client.checkpoint.plan_image(301, 117)
        assert (item.header.rows, item.header.grid) == (plan.rows, media_pb2.Grid(t=1, h=plan.grid.h, w=plan.grid.w))
        assert item.header.model_fingerprint == client.checkpoint.fingerprint
        (feature,) = item.header.features
        assert feature.dtype == tensor_pb2.DATA_TYPE_FLOAT32
        assert item.rows().shape == (plan.rows, feature.hidden_size)
        assert (item.rows() - expected_rows(path, image)).abs().max() < 1e-5
        assert item.done.preprocess_seconds > 0 and item.done.encode_seconds > 0


async def test_many_items_in_one_call_and_in_batches(checkpoint_dir: Dirs) -> None:
    path = checkpoint_dir("qwen2_vl")
    images = [picture(40 + 37 * i, 200 - 13 * i, i) for i in range(10)]
    async with running(path, max_num_batched_patches=500) as client:
        refs = [await client.encode_picture(image) for image in images]
        items = await client.fetch(*refs, max_chunk_bytes=1000)
        for image, item in zip(images, items, strict=True):
            assert len(item.chunks) > 1
            assert (item.rows() - expected_rows(path, image)).abs().max() < 1e-5


async def test_a_stream_resumes_where_it_broke(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        ref = await client.encode_picture(picture(200, 200))
        (whole,) = await client.fetch(ref)
        got = []
        async for _, event in client.events([(ref, 0)], max_chunk_bytes=512):
            if event.HasField("chunk"):
                got.append(event.chunk.rows)
            if len(got) == 3:
                break
        next_row = got[-1].row_offset + got[-1].shape[0]
        (rest,) = await client.fetch((ref, next_row))
        assert torch.equal(rest.rows(), whole.rows()[next_row:])


async def test_fetch_may_come_first_and_two_readers_get_all(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        with gate(client):
            ref = await client.encode_picture(picture(100, 100))
            readers = [asyncio.create_task(client.fetch(ref, max_chunk_bytes=size)) for size in (300, 100_000)]
            await client.wait_until(lambda load: load.pending_items == 1)
            assert not any(reader.done() for reader in readers)
        (first,), (second,) = await asyncio.gather(*readers)
        assert torch.equal(first.rows(), second.rows())


async def test_a_failed_item_does_not_hold_up_or_harm_the_others(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llava")) as client:
        bad = await client.encode(b"this is text", 3, field="messages[0].parts[0].image")
        good = await client.encode_picture(picture(50, 60))
        broken, unknown, fine = await client.fetch(bad, "no such ref", good)
        assert broken.error is not None and broken.header is None
        assert (broken.error.code, broken.error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "messages[0].parts[0].image")
        assert "accepted are JPEG" in broken.error.message
        assert unknown.error is not None and (unknown.error.code, unknown.error.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "REF_NOT_FOUND",
        )
        assert fine.error is None and fine.done is not None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (file_bytes(picture(90, 90), "JPEG")[:1500], "truncated"),
        (png_header(0, 9), "image"),
        (png_header(9000, 9000), "at most 50000000 pixels"),
        (file_bytes(picture(2010, 10)), "at most 200 times"),
        (b"GIF89a", "not a readable image"),
    ],
)
async def test_bad_media_fail_with_their_field_and_the_next_item_works(checkpoint_dir: Dirs, data: bytes, text: str) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        (item,) = await client.fetch(await client.encode(data, 4))
        assert item.error is not None and item.error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert item.error.field == "parts[0].image" and text in item.error.message
        (item,) = await client.fetch(await client.encode_picture(picture(30, 30)))
        assert item.done is not None


@pytest.mark.parametrize(
    ("data", "changes", "text"),
    [
        (b"", {}, "is empty"),
        (b"x" * 1001, {}, "has 1001 bytes; at most 1000"),
        (b"x", {"expected_rows": 0}, "expected_rows"),
        (b"x", {"expected_rows": 2**32 - 1}, "1 to 1048576, got 4294967295"),
        (b"x", {"whole_rows": 2**32 - 1}, "at most 1048576, got 4294967295"),
        (b"x", {"max_pixels": 50_000_001}, "max_pixels: it must be at most 50000000"),
        (b"x", {"min_pixels": 2**64 - 1}, "min_pixels: it must be at most 50000000"),
        (b"x", {"cache_salt": "ä" * 65}, "at most 128 bytes, got 130"),
        (b"x", {"frames": range(769)}, "769 frames are to be looked at; accepted are 1 to 768"),
        (b"x", {"times": [0.0] * 769}, "769 frames are to be looked at; accepted are 1 to 768"),
        (b"x", {"modality": media_pb2.MODALITY_AUDIO}, "it takes image"),
        (b"x", {"modality": media_pb2.MODALITY_UNSPECIFIED}, "it takes image"),
    ],
)
async def test_what_is_wrong_at_sight_is_refused_at_once(checkpoint_dir: Dirs, data: bytes, changes: dict, text: str) -> None:
    async with running(checkpoint_dir("llava"), max_item_bytes=1000) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
            await client.encode(data, 4, **changes)
        error = error_of(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.field in ("parts[0].image", *changes)
        assert (await client.load()).refs == 0


async def test_rows_or_a_grid_other_than_planned_fail_the_item(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        plan = client.checkpoint.plan_image(280, 140)
        data = file_bytes(picture(280, 140))
        before = REGISTRY.get_sample_value("estimate_mismatch_total") or 0.0
        turned = media_pb2.Grid(t=1, h=plan.grid.w, w=plan.grid.h)
        refs = [
            await client.encode(data, plan.rows + 1),
            await client.encode(data, plan.rows, turned),
            await client.encode(data, plan.rows),
        ]
        rows, grid, fine = await client.fetch(*refs)
        for item in (rows, grid):
            assert item.error is not None and (item.error.code, item.error.reason) == (
                grpc.StatusCode.INTERNAL,
                "ESTIMATE_MISMATCH",
            )
        assert rows.error.metadata == {"planned": str(plan.rows + 1), "actual": str(plan.rows)}
        assert (grid.error.metadata["planned_grid"], grid.error.metadata["actual_grid"]) == ("1x20x10", "1x10x20")
        assert fine.done is not None
        assert REGISTRY.get_sample_value("estimate_mismatch_total") == before + 2


async def test_a_full_encoder_refuses_with_a_delay(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl"), max_pending_items=2) as client:
        with gate(client):
            refs = [await client.encode_picture(picture(30, 30, i)) for i in range(2)]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.encode_picture(picture(30, 30, 2))
            refs.append(await client.encode_picture(picture(30, 30, 1)))  # what is under way takes no place
        error = error_of(caught.value)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_delay
        assert (error.reason, error.metadata) == ("ENCODER_FULL", {"limit": "2", "requested": "3"})
        assert all(item.done for item in await client.fetch(*refs))
        await client.encode_picture(picture(30, 30))


async def test_media_beyond_the_held_bytes_are_refused(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl"), max_held_bytes=100) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="holds 0 of at most 100 bytes"):
            await client.encode_picture(picture(30, 30))


async def test_everything_is_back_after_release(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        start = await client.load()
        assert (start.refs, start.held_bytes, start.pending_items) == (0, 0, 0)
        assert (start.max_pending_items, start.max_held_bytes) == (256, 4 * 1024**3)
        assert 0 < start.max_num_batched_patches <= 16384  # as many as pay on this device
        done = [await client.encode_picture(picture(60, 60, i)) for i in range(3)]
        failed = await client.encode(b"junk", 4)
        items = await client.fetch(*done, failed)
        load = await client.load()
        assert load.refs == 4 and load.encoded_items == 3
        assert (load.pending_patches, load.encoded_patches) == (0, 3 * 16)
        assert load.held_bytes == sum(item.rows().nbytes for item in items[:3])
        assert load.cached_items == 0
        with gate(client):
            pending = [await client.encode_picture(picture(60, 60, 10 + i)) for i in range(4)]
            reader = asyncio.create_task(client.fetch(*pending))
            await client.wait_until(lambda load: load.pending_items == 4 and load.tasks > start.tasks)
            await client.wait_until(lambda load: load.pending_patches == 4 * 16)
            await client.release(*done, failed, *pending, "unknown")
            assert all(item.error and item.error.reason == "REF_NOT_FOUND" for item in await reader)
            await client.release(*done)
            end = await client.wait_until(lambda load: load.tasks == start.tasks)
        end = await client.wait_until(lambda load: load.pending_patches == 0)
        assert (end.refs, end.held_bytes, end.pending_items) == (0, 0, 0)
        assert (end.cached_items, end.cached_bytes) == (3, load.held_bytes)


async def test_a_hundred_requests_with_one_picture_encode_it_once(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        image = picture(60, 60)
        refs = await asyncio.gather(*(client.encode_picture(image) for _ in range(100)))
        assert len(set(refs)) == 100
        items = await client.fetch(*refs)
        assert all(item.rows().equal(items[0].rows()) for item in items)
        await client.release(*refs)
        load = await client.load()
        assert (load.encoded_items, load.cache_hits, load.cache_misses, load.refs, load.cached_items) == (1, 99, 1, 0, 1)
        (again,) = await client.fetch(await client.encode_picture(image))
        assert again.rows().equal(items[0].rows()) and again.done == encoder_pb2.ItemDone()
        other = await client.encode_picture(image, cache_salt="another tenant")
        assert (await client.fetch(other))[0].rows().equal(items[0].rows())
        assert (await client.load()).encoded_items == 2


async def test_a_reader_that_takes_nothing_costs_nothing_after_its_lease(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl"), lease_seconds=1.0) as client:
        start, store, rows = await client.load(), client.service.store, 20_000
        ref = store.claim(b"larger than the buffers between the two ends", 0)
        store.open(ref.entry, Header(rows, Grid(1, 1, rows), ((1024, torch.float32),)))
        store.append(ref.entry, [torch.zeros(rows, 1024)])
        call = client.stub.Fetch(encoder_pb2.FetchRequest(items=[encoder_pb2.FetchItem(ref_id=ref.ref_id)]))
        responses = aiter(call)
        assert (await anext(responses)).HasField("header")
        await client.wait_until(lambda load: load.refs == 0 and load.held_bytes == 0)
        assert store.empty.is_set()
        last = [response async for response in responses][-1]
        assert last.error.code == grpc.StatusCode.NOT_FOUND.value[0]
        await client.wait_until(lambda load: load.tasks == start.tasks)


async def test_cancelling_a_fetch_frees_its_reader(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl"), lease_seconds=0.3) as client:
        start = await client.load()
        with gate(client):
            ref = await client.encode_picture(picture(60, 60))
            reader = asyncio.create_task(client.fetch(ref))
            await asyncio.sleep(0.5)
            assert (await client.load()).refs == 1, "the lease stands still while somebody reads"
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            end = await client.wait_until(lambda load: load.refs == 0 and load.tasks == start.tasks)
        assert (end.held_bytes, end.pending_items) == (0, 0)


async def test_a_ref_that_nobody_fetches_expires(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl"), lease_seconds=0.2) as client:
        ref = await client.encode_picture(picture(60, 60))
        await client.wait_until(lambda load: load.refs == 0)
        (item,) = await client.fetch(ref)
        assert item.error is not None and item.error.reason == "REF_NOT_FOUND"
        assert "0.2 s" in item.error.message


async def test_an_unforeseen_error_is_opaque_and_names_the_request(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def explode(self: Batcher, turn: object) -> None:
        raise RuntimeError("secret /path at 0x7f00")

    monkeypatch.setattr(Batcher, "room", explode)
    async with running(checkpoint_dir("qwen2_vl")) as client:
        ref = await client.encode(file_bytes(picture(60, 60)), 4, request_id="req-7")
        (item,) = await client.fetch(ref)
        assert item.error is not None and item.error.code is grpc.StatusCode.INTERNAL
        assert "req-7" in item.error.message and "secret" not in item.error.message


async def test_fetching_nothing_is_refused(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="at least one item"):
            await client.fetch()


async def test_a_text_model_is_served_and_takes_no_media(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llama")) as client:
        assert (await client.load()).parameter_bytes == 0
        with pytest.raises(grpc.aio.AioRpcError, match="takes no media") as caught:
            await client.encode(b"x", 4)
        error = error_of(caught.value)
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "parts[0].image")


async def test_a_fetch_of_too_many_items_is_refused(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("qwen2_vl")) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.fetch(*["no such ref"] * 4097)
        assert error_of(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 4096" in error_of(caught.value).message


async def test_how_closely_an_item_is_looked_at_is_part_of_what_it_is(checkpoint_dir: Dirs) -> None:
    """Rows are those of the plan, and are kept apart from those of the same bytes looked at otherwise."""
    data = file_bytes(picture(200, 120))
    async with running(checkpoint_dir("qwen2_vl")) as client:
        looks = [Look(), Look(max_pixels=20 * 28 * 28), Look(min_pixels=60 * 28 * 28), Look(low=True)]
        plans = [client.checkpoint.plan([Picture(200, 120, look)])[0] for look in looks]
        assert plans[1].rows < plans[0].rows < plans[2].rows
        refs = [
            await client.encode(
                data,
                plan.rows,
                media_pb2.Grid(t=plan.grid.t, h=plan.grid.h, w=plan.grid.w),
                patches=plan.patches,
                low_detail=plan.look.low,
                min_pixels=plan.look.min_pixels,
                max_pixels=plan.look.max_pixels,
            )
            for plan in (*plans, plans[1])
        ]
        for plan, item in zip((*plans, plans[1]), await client.fetch(*refs), strict=True):
            assert item.error is None and len(item.rows()) == plan.rows
        load = await client.load()
        assert (load.encoded_items, load.cache_hits) == (4, 1)


async def test_what_a_family_does_not_heed_is_refused(checkpoint_dir: Dirs) -> None:
    async with running(checkpoint_dir("llava")) as client:
        for told in ({"low_detail": True}, {"max_pixels": 900}):
            with pytest.raises(grpc.aio.AioRpcError, match="heeds no such limits"):
                await client.encode(b"x", 4, **told)


async def test_a_picture_among_others_is_a_single_tile(checkpoint_dir: Dirs) -> None:
    """What the plan says travels with the item: LLaVA-OneVision tiles a picture only where it is alone."""
    path, image = checkpoint_dir("llava_onevision"), picture(200, 120)
    async with running(path) as client:
        alone, among = client.checkpoint.plan_image(200, 120), client.checkpoint.plan([Picture(200, 120)] * 2)[0]
        assert alone.rows > among.rows and (alone.tiles > 1, among.tiles) == (True, 1)
        refs = [await client.encode(file_bytes(image), p.rows, tiles=p.tiles, patches=p.patches) for p in (alone, among)]
        for plan, item in zip((alone, among), await client.fetch(*refs), strict=True):
            assert item.error is None and len(item.rows()) == plan.rows
        (wrong,) = await client.fetch(await client.encode(file_bytes(image), among.rows, tiles=alone.tiles))
        assert wrong.error is not None and wrong.error.reason == "ESTIMATE_MISMATCH"
