"""Fetches embedding rows from encoders and hands them on in order, resuming where a stream broke."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from services.common import logs
from services.common.channel import open_channel, outgoing_metadata
from services.common.errors import ServiceError, invalid, unavailable
from services.common.shared_memory import Address, NotShared, open_block, this_place
from services.llm.fetched import Fetched, read_response
from services.models.rows import block_bytes, split_block
from services.models.wire import from_chunk, torch_dtype
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2

logger = logging.getLogger(__name__)
OnRows = Callable[[int, int, torch.Tensor], None]
OnKept = Callable[[int, torch.Tensor], None]
_IDLE_CHANNELS = 16  # kept; encoders come and go, each at an address of its own
_TRIES = 3  # streams per encoder; each resumes at the first row that has not arrived


@dataclass
class RemoteItem:
    """One item's rows at an encoder, and how far they have come.

    Attributes:
        spans: the prompt's runs that its rows are for, as (span, rows), in the order of the rows.
        arrived: rows that are here, by feature.
        whole_rows: rows before pruning; 0 where nothing is pruned.
        shared: its features in the encoder's memory, where they are read there.
    """

    ref_id: str
    encoder_address: str
    spans: list[tuple[int, int]]
    arrived: list[int]
    whole_rows: int = 0
    shared: list[torch.Tensor] | None = None
    done: bool = False
    preprocess_seconds: float = 0.0
    encode_seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of each feature."""
        return sum(rows for _, rows in self.spans)

    def take(self, feature: int, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Note the next rows of a feature and split them among spans."""
        at, start = self.arrived[feature], 0
        self.arrived[feature] += len(rows)
        for span, count in self.spans:
            stop = start + count
            if start < at + len(rows) and at < stop:
                yield span, rows[max(start - at, 0) : stop - at]
            start = stop


@dataclass
class FetchTimes:
    """Seconds of the slowest item at the encoder, and of receiving beyond that."""

    preprocess: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0


@dataclass
class RowFetcher:
    """Fetches for one language model; keeps one channel per encoder, of those that are idle the latest ones.

    Rows of another checkpoint, width or count than planned are refused.

    Attributes:
        features: matrices of rows that every item has, all of width ``hidden_size``.
        max_chunk_bytes: most bytes of rows in a message.
    """

    model_fingerprint: str
    hidden_size: int
    features: int = 1
    max_chunk_bytes: int = 1024**2
    _apart: set[str] = field(default_factory=set)  # addresses of encoders whose memory cannot be opened
    _channels: OrderedDict[str, grpc.aio.Channel] = field(default_factory=OrderedDict)  # the least recently used first
    _users: Counter[str] = field(default_factory=Counter)

    async def fetch(
        self, request_id: str, items: Sequence[RemoteItem], on_rows: OnRows, timeout: float, on_kept: OnKept | None = None
    ) -> FetchTimes:
        """Stream every item's rows into ``on_rows(span, feature, rows)``, in order within a feature of a span.

        Before those of a pruned item, ``on_kept(span, kept)`` gets which of its whole rows are left.

        Raises:
            ServiceError: an item failed at its encoder, does not match the plan, or an encoder stayed unreachable.
        """
        started = time.monotonic()
        addresses = {item.encoder_address for item in items}
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for address in addresses:
                group.create_task(
                    self._fetch_from(address, request_id, [i for i in items if i.encoder_address == address], on_rows, on_kept)
                )
        slowest = max(items, key=lambda i: i.preprocess_seconds + i.encode_seconds)
        at_encoder = slowest.preprocess_seconds + slowest.encode_seconds
        return FetchTimes(slowest.preprocess_seconds, slowest.encode_seconds, max(0.0, time.monotonic() - started - at_encoder))

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    async def _fetch_from(
        self, address: str, request_id: str, items: list[RemoteItem], on_rows: OnRows, on_kept: OnKept | None
    ) -> None:
        async with self._channel(address) as channel:
            await self._stream(_fetch_call(channel), request_id, items, on_rows, on_kept)

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        self._channels.move_to_end(address)
        self._users[address] += 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1
            idle = [a for a in self._channels if not self._users[a]]
            for a in idle[: max(0, len(idle) - _IDLE_CHANNELS)]:
                del self._users[a]
                await self._channels.pop(a).close()

    async def _stream(
        self, fetch: Any, request_id: str, items: list[RemoteItem], on_rows: OnRows, on_kept: OnKept | None
    ) -> None:
        """Every row of one encoder's items, on as few streams as it takes."""
        address, cause = items[0].encoder_address, ""
        for attempt in range(1, _TRIES + 1):
            left = [item for item in items if not item.done]
            wanted = [encoder_pb2.FetchItem(ref_id=item.ref_id, start_row=min(item.arrived)) for item in left]
            place = "" if cause or address in self._apart else this_place()
            request = encoder_pb2.FetchRequest(
                request_id=request_id, items=wanted, max_chunk_bytes=self.max_chunk_bytes, place=place
            )
            call = fetch(request, metadata=outgoing_metadata())
            try:
                async for fetched in call:
                    self._take(left[fetched.response.item], fetched, on_rows, on_kept)
            except NotShared as error:
                cause = str(error)
                if attempt == _TRIES:
                    raise _lost(unavailable(f"the encoder's memory cannot be opened ({cause}); try again"), address) from None
                continue
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or attempt == _TRIES:
                    raise _lost(ServiceError.from_rpc(error, "encoder"), address) from error
                continue
            finally:
                call.cancel()
            if not all(item.done for item in items):
                raise ServiceError(grpc.StatusCode.INTERNAL, "the encoder ended its stream before every row was sent")
            if cause:  # rows that can be sent and not opened; where a ref is gone, neither can be
                logs.event(logger, "encoder's memory cannot be opened, rows are sent", encoder=address, cause=cause)
                self._apart.add(address)
            return

    def _take(self, item: RemoteItem, fetched: Fetched, on_rows: OnRows, on_kept: OnKept | None) -> None:
        response = fetched.response
        match response.WhichOneof("event"):
            case "header":
                self._check_header(item, response.header)
                if item.whole_rows and on_kept and not any(item.arrived):
                    on_kept(item.spans[0][0], _kept(item, response.header))
                item.shared = map_rows(response.header) if response.header.HasField("shared_memory") else None
            case "chunk":
                rows = self._rows(item, response.chunk, fetched.data)
                for span, part in item.take(response.chunk.feature, rows):
                    on_rows(span, response.chunk.feature, part)
            case "ready":
                if item.shared is None or not max(item.arrived) <= response.ready.rows <= item.rows:
                    raise _mismatch(f"{response.ready.rows} of {item.rows} rows are ready, {max(item.arrived)} were")
                for feature, matrix in enumerate(item.shared):
                    for span, part in item.take(feature, matrix[item.arrived[feature] : response.ready.rows]):
                        on_rows(span, feature, part)
            case "done":
                if any(arrived != item.rows for arrived in item.arrived):
                    raise _mismatch(f"the encoder sent {min(item.arrived)} rows of {item.rows}")
                item.done, item.shared = True, None
                item.preprocess_seconds, item.encode_seconds = response.done.preprocess_seconds, response.done.encode_seconds
            case "error":
                raise _lost(ServiceError.from_proto(response.error), item.encoder_address)

    def _check_header(self, item: RemoteItem, header: encoder_pb2.ItemHeader) -> None:
        if header.model_fingerprint != self.model_fingerprint:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "encoder and language model hold different checkpoints; start both with the same --model",
                reason="MODEL_MISMATCH",
            )
        if header.rows != item.rows:
            raise _mismatch(f"the plan has {item.rows} rows but the encoder made {header.rows}")
        widths = [feature.hidden_size for feature in header.features]
        if widths != [self.hidden_size] * self.features:
            raise _mismatch(
                f"the language model takes {self.features} feature(s) of width {self.hidden_size}, "
                f"the encoder sends widths {widths}"
            )

    def _rows(self, item: RemoteItem, chunk: encoder_pb2.ItemChunk, data: memoryview | None) -> torch.Tensor:
        try:
            rows = from_chunk(chunk.rows, data)
        except ValueError as error:
            raise ServiceError(grpc.StatusCode.DATA_LOSS, f"embedding rows arrived damaged: {error}") from error
        if chunk.rows.total_rows != item.rows:
            raise _mismatch(f"the plan has {item.rows} rows but the encoder sends {chunk.rows.total_rows}")
        offset = chunk.rows.row_offset
        arrived = item.arrived[chunk.feature] if chunk.feature < self.features else -1
        if not offset <= arrived <= offset + len(rows) <= item.rows or rows.shape[1] != self.hidden_size:
            raise _mismatch(
                f"rows {offset} to {offset + len(rows)} of width {rows.shape[1]} of feature {chunk.feature} do not follow row "
                f"{arrived} of {item.rows}"
            )
        rows = rows[arrived - offset :]  # a resumed stream starts at the feature that is furthest behind
        return rows


def _fetch_call(channel: grpc.aio.Channel) -> Any:
    """As the stub's ``Fetch``, but for how answers are read."""
    return channel.unary_stream(
        f"/{encoder_pb2.DESCRIPTOR.services_by_name['EncoderService'].full_name}/Fetch",
        request_serializer=encoder_pb2.FetchRequest.SerializeToString,
        response_deserializer=read_response,
    )


def _kept(item: RemoteItem, header: encoder_pb2.ItemHeader) -> torch.Tensor:
    kept = torch.tensor(header.kept_rows, dtype=torch.long)  # [rows]
    if len(kept) != item.rows or (len(kept) and int(kept[-1]) >= item.whole_rows) or not bool((kept.diff() > 0).all()):
        raise _mismatch(f"{item.rows} of {item.whole_rows} rows should be left, the encoder names {len(kept)}")
    return kept


def map_rows(header: encoder_pb2.ItemHeader) -> list[torch.Tensor]:
    """An item's features where they lie in the encoder's memory, each [rows, hidden]; they stay as long as a view of them does.

    Raises:
        NotShared: they cannot be opened from here.
    """
    try:
        features = [(feature.hidden_size, torch_dtype(feature.dtype)) for feature in header.features]
    except ValueError as error:
        raise _mismatch(str(error)) from None
    at = header.shared_memory
    if at.bytes != block_bytes(header.rows, features):
        raise _mismatch(f"the encoder's memory has {at.bytes} bytes for {header.rows} rows")
    descriptor = open_block(Address(at.pid, at.descriptor, at.inode, at.bytes))
    try:
        # not shared: what is written here would stay here
        block = torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=at.bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise NotShared(str(error)) from None
    finally:
        os.close(descriptor)
    return split_block(block, header.rows, features)


def remote_items(spans: Sequence[media_pb2.Span], features: int) -> list[RemoteItem]:
    """The items that a prompt's spans stand for: those with the same ref are runs of one item.

    Raises:
        ServiceError: INVALID_ARGUMENT; an item's runs leave out rows or stand for some twice.
    """
    items: dict[tuple[str, str], RemoteItem] = {}
    for i, span in enumerate(spans):
        ref = span.ref.encoder_address, span.ref.id
        item = items.setdefault(ref, RemoteItem(span.ref.id, span.ref.encoder_address, [], [0] * features))
        if span.first_row != item.rows:
            raise invalid(
                f"spans[{i}].first_row", f"must be {item.rows}, the row behind the ref's earlier run, got {span.first_row}"
            )
        item.spans.append((i, span.rows))
        item.whole_rows = span.whole_rows
    return list(items.values())


def _lost(error: ServiceError, address: str) -> ServiceError:
    """An error that another encoder would not have made says which encoder it is about; the caller may encode elsewhere."""
    if error.code is grpc.StatusCode.UNAVAILABLE and error.reason is None:
        error.reason = "ENCODER_LOST"
    if error.reason in ("ENCODER_LOST", "REF_NOT_FOUND"):
        error.metadata["encoder"] = address
    return error


def _mismatch(text: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, f"embedding rows do not match the plan: {text}", reason="ESTIMATE_MISMATCH")
