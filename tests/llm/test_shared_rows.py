"""Rows that a language model reads in the encoder's memory: the same as those that are sent, and sent where that cannot be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from services.common.errors import ServiceError
from services.common.interceptor import ServiceInterceptor
from services.common.server import SERVER_OPTIONS
from services.common.shared_memory import Address, Block, NotShared, open_block, this_place
from services.encoder.config import EncoderConfig
from services.encoder.rows import SHARED_FROM
from services.encoder.sent import add_to_server
from services.encoder.servicer import EncoderServicer
from services.encoder.store import Done, Header, Ref, Store
from services.llm.embeddings import RemoteItem, RowFetcher
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Grid
from tests.patience import PATIENCE

HIDDEN, ROWS = 128, 8 * SHARED_FROM // (128 * 4)
FEATURES = ((HIDDEN, torch.float32), (HIDDEN, torch.float32))
pytestmark = pytest.mark.asyncio
Dirs = Callable[[str], Path]


@asynccontextmanager
async def encoder(checkpoint: Checkpoint, **options: Any) -> AsyncIterator[tuple[Store, str]]:
    """An encoder's store and the address at which it is served."""
    store = Store(30, shared_items=100)
    config = EncoderConfig(model=str(checkpoint.path), **options)
    server = grpc.aio.server(interceptors=[ServiceInterceptor()], options=SERVER_OPTIONS)
    add_to_server(EncoderServicer(checkpoint, config, store), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield store, f"127.0.0.1:{port}"
    await server.stop(None)
    store.clear()


def item(store: Store) -> tuple[Ref, list[torch.Tensor]]:
    """An item that is done, and its features."""
    features = [torch.randn(ROWS, HIDDEN) for _ in FEATURES]
    ref = store.claim(os.urandom(16), 0)
    store.open(ref.entry, Header(ROWS, Grid(1, 1, ROWS), FEATURES))
    store.append(ref.entry, features)
    store.finish(ref.entry, Done(0, 0))
    return ref, features


class Receiver:
    """Takes rows of two spans that share an item, the first of 100 rows."""

    def __init__(self, ref: Ref, address: str) -> None:
        self.item = RemoteItem(ref.ref_id, address, [(0, 100), (1, ROWS - 100)], [0, 0])
        self.rows: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.came = asyncio.Event()

    def __call__(self, span: int, feature: int, rows: torch.Tensor) -> None:
        self.rows.setdefault((span, feature), []).append(rows)
        self.came.set()

    def features(self) -> list[torch.Tensor]:
        return [torch.cat([*self.rows[0, f], *self.rows[1, f]]) for f in range(2)]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("options", [{}, {"shared_memory": "off"}])
async def test_rows_read_in_place_are_those_that_are_sent(checkpoint_dir: Dirs, options: dict[str, str]) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint, **options) as (store, address):
        ref, features = item(store)
        fetcher, receiver = RowFetcher(checkpoint.fingerprint, HIDDEN, 2), Receiver(ref, address)
        await fetcher.fetch("r", [receiver.item], receiver, 10)
        parts = [rows for parts in receiver.rows.values() for rows in parts]
        assert (len(parts) == 4) == (not options)  # in place, a span's rows come in one piece
        assert all(got.equal(sent) for got, sent in zip(receiver.features(), features, strict=True))
        store.drop([ref.ref_id])  # what was read stays
        assert all(got.equal(sent) for got, sent in zip(receiver.features(), features, strict=True))
        await fetcher.close()


async def test_rows_are_read_while_others_are_being_made(checkpoint_dir: Dirs) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        ref = store.claim(b"key", 0)
        features = [torch.randn(ROWS, HIDDEN) for _ in FEATURES]
        fetcher, receiver = RowFetcher(checkpoint.fingerprint, HIDDEN, 2), Receiver(ref, address)
        fetching = asyncio.create_task(fetcher.fetch("r", [receiver.item], receiver, 10))
        store.open(ref.entry, Header(ROWS, Grid(1, 1, ROWS), FEATURES))
        for start in range(0, ROWS, ROWS // 4):
            receiver.came.clear()
            store.append(ref.entry, [feature[start : start + ROWS // 4] for feature in features])
            await asyncio.wait_for(receiver.came.wait(), PATIENCE)
            assert receiver.item.arrived[0] == start + ROWS // 4
        store.finish(ref.entry, Done(0, 0))
        await fetching
        assert all(got.equal(sent) for got, sent in zip(receiver.features(), features, strict=True))
        await fetcher.close()


async def test_memory_that_cannot_be_opened_is_sent_and_not_asked_for_again(
    checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(address: Address) -> int:
        tried.append(address)
        raise NotShared("not permitted")

    monkeypatch.setattr("services.llm.embeddings.open_block", refuse)
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        fetcher = RowFetcher(checkpoint.fingerprint, HIDDEN, 2)
        for _ in range(2):
            ref, features = item(store)
            receiver = Receiver(ref, address)
            await fetcher.fetch("r", [receiver.item], receiver, 10)
            assert all(got.equal(sent) for got, sent in zip(receiver.features(), features, strict=True))
        assert len(tried) == 1
        await fetcher.close()


async def test_a_ref_that_goes_away_does_not_end_reading_in_place(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        fetcher = RowFetcher(checkpoint.fingerprint, HIDDEN, 2)
        ref, _ = item(store)

        def gone(at: Address) -> int:
            store.drop([ref.ref_id])
            return open_block(at)

        with monkeypatch.context() as patched:
            patched.setattr("services.llm.embeddings.open_block", gone)
            with pytest.raises(ExceptionGroup) as caught:
                await fetcher.fetch("r", [Receiver(ref, address).item], lambda *rows: None, 10)
        (error,) = caught.value.exceptions
        assert isinstance(error, ServiceError) and error.reason == "REF_NOT_FOUND"
        receiver = Receiver(item(store)[0], address)
        await fetcher.fetch("r", [receiver.item], receiver, 10)
        assert len([rows for parts in receiver.rows.values() for rows in parts]) == 4, "in place, one piece for each span"
        await fetcher.close()


class Calls:
    """Answers ``Fetch`` with one outcome for each call."""

    def __init__(self, *outcomes: Exception) -> None:
        self._outcomes = list(outcomes)
        self.ended = 0

    def __call__(self, request: Any, metadata: Any) -> Calls:
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise self._outcomes.pop(0)
        yield

    def cancel(self) -> None:
        self.ended += 1


async def test_a_fetch_whose_last_try_cannot_open_memory_is_no_success() -> None:
    metadata = grpc.aio.Metadata()
    away = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata)
    fetcher, calls = RowFetcher("model", HIDDEN), Calls(away, away, NotShared("not permitted"))
    wanted = RemoteItem("ref", "encoder:1", [(0, 1)], [0])
    with pytest.raises(ServiceError) as caught:
        await fetcher._stream(calls, "r", [wanted], lambda *rows: None, None)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE and not wanted.done
    assert calls.ended == 3, "no stream is left open"


async def test_another_place_gets_rows_sent(checkpoint_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.llm.embeddings.this_place", lambda: "another host")
    monkeypatch.setattr("services.llm.embeddings.open_block", lambda address: pytest.fail("nothing is to be opened"))
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        ref, features = item(store)
        fetcher, receiver = RowFetcher(checkpoint.fingerprint, HIDDEN, 2), Receiver(ref, address)
        await fetcher.fetch("r", [receiver.item], receiver, 10)
        assert receiver.features()[1].equal(features[1])
        await fetcher.close()


async def test_memory_of_another_size_is_refused(checkpoint_dir: Dirs) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        ref, _ = item(store)
        assert ref.entry.rows is not None and ref.entry.header is not None
        ref.entry.header = Header(ROWS, Grid(1, 1, ROWS), (FEATURES[0], (HIDDEN, torch.bfloat16)))
        fetcher, receiver = RowFetcher(checkpoint.fingerprint, HIDDEN, 2), Receiver(ref, address)
        with pytest.raises(ExceptionGroup) as caught:
            await fetcher.fetch("r", [receiver.item], receiver, 10)
        (error,) = caught.value.exceptions
        assert isinstance(error, ServiceError) and error.reason == "ESTIMATE_MISMATCH"
        await fetcher.close()


async def test_no_descriptor_is_left_behind(checkpoint_dir: Dirs) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    async with encoder(checkpoint) as (store, address):
        fetcher = RowFetcher(checkpoint.fingerprint, HIDDEN, 2)

        async def once() -> None:
            ref, _ = item(store)
            receiver = Receiver(ref, address)
            await fetcher.fetch("r", [receiver.item], receiver, 10)
            store.drop([ref.ref_id])

        await once()
        before = descriptors()
        for _ in range(20):
            await once()
        assert descriptors() == before
        await fetcher.close()


async def test_a_descriptor_s_next_owner_is_not_mistaken_for_the_block() -> None:
    first = Block(4096)
    address = first.address
    first.close()
    second = Block(4096)
    assert second.address.descriptor == address.descriptor, "the number is taken again"
    with pytest.raises(NotShared):
        open_block(address)
    second.close()
    with pytest.raises(NotShared):
        open_block(address)
    assert this_place()
