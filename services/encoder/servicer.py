"""Messages to calls and back; decides nothing but what a request may say."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.common import logs
from services.common.errors import ServiceError, invalid, unavailable
from services.common.interceptor import clean_request_id
from services.common.salts import check_salt
from services.common.shared_memory import this_place
from services.encoder.config import EncoderConfig
from services.encoder.pipeline import Pipeline, Planned
from services.encoder.reader import Chunk, Event, Ready, Shared, read
from services.encoder.sent import Sent
from services.encoder.store import Done, Header, Store
from services.models.checkpoint import Checkpoint
from services.models.media import Grid, ItemPlan, Look, Modality
from services.models.wire import put_chunk, wire_dtype
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc

DEFAULT_CHUNK_BYTES = 512 * 1024
MAX_FETCH_ITEMS = 4096
MAX_ROWS = 1 << 20  # of an item
_LONG = 256 * 1024  # bytes; hashing more takes a thread
MAX_FIELD = 256  # characters; it comes back in error texts
Context = grpc.aio.ServicerContext[Any, Any]


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers for one checkpoint.

    Attributes:
        pipeline: set once the towers are loaded; stays None for a checkpoint that takes no media.
        parameter_bytes: bytes of parameters loaded.
    """

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, store: Store) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._store = store
        self.pipeline: Pipeline | None = None
        self.parameter_bytes = 0

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Context) -> encoder_pb2.EncodeResponse:
        _name_request(request.request_id)
        planned = self._planned(request)
        if self.pipeline is None:
            raise unavailable("the encoder is still loading its weights; try again")
        data = request.data
        self._check_data(planned, len(data))
        key = await asyncio.to_thread(_key, request, data) if len(data) > _LONG else _key(request, data)
        if key not in self._store:
            self._check_room(len(data))
        return encoder_pb2.EncodeResponse(ref_id=self.pipeline.submit(key, planned, data))

    async def Fetch(  # type: ignore[override]  # sent.to_bytes takes both
        self, request: encoder_pb2.FetchRequest, context: Context
    ) -> AsyncIterator[encoder_pb2.FetchResponse | Sent]:
        _name_request(request.request_id)
        if not request.items:
            raise invalid("items", "there must be at least one item to fetch")
        if len(request.items) > MAX_FETCH_ITEMS:
            raise invalid("items", f"there may be at most {MAX_FETCH_ITEMS} items to fetch, got {len(request.items)}")
        wanted = [(item.ref_id, item.start_row) for item in request.items]
        chunk_bytes = min(request.max_chunk_bytes or DEFAULT_CHUNK_BYTES, self._config.max_chunk_bytes)
        shared = self._config.shared_memory == "auto" and request.place == this_place() != ""
        async with aclosing(read(self._store, wanted, chunk_bytes, shared=shared)) as events:
            async for index, event in events:
                yield self._response(index, event)

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Context) -> encoder_pb2.ReleaseResponse:
        self._store.drop(request.ref_ids)
        return encoder_pb2.ReleaseResponse()

    async def GetLoad(self, request: encoder_pb2.GetLoadRequest, context: Context) -> encoder_pb2.GetLoadResponse:
        pipeline = self.pipeline
        return encoder_pb2.GetLoadResponse(
            pending_items=self._store.pending_items,
            refs=len(self._store),
            held_bytes=self._store.held_bytes,
            tasks=len(asyncio.all_tasks()),
            encoded_items=self._store.encoded_items,
            model_fingerprint=self._checkpoint.fingerprint,
            parameter_bytes=self.parameter_bytes,
            cached_items=self._store.cached_items,
            cached_bytes=self._store.cached_bytes,
            cache_hits=self._store.hits,
            cache_misses=self._store.misses,
            cache_evictions=self._store.evictions,
            pending_patches=pipeline.pending_patches if pipeline else 0,
            max_pending_items=self._config.max_pending_items,
            max_held_bytes=self._config.max_held_bytes,
            max_num_batched_patches=pipeline.batch_patches if pipeline else 0,
            encoded_patches=pipeline.encoded_patches if pipeline else 0,
        )

    def _planned(self, request: encoder_pb2.EncodeRequest) -> Planned:
        field = request.field[:MAX_FIELD] or "data"
        supported = self._checkpoint.family.modalities
        if not supported:
            raise invalid(field, f"the model {self._checkpoint.name} takes no media; send it text only, or serve another model")
        if int(request.modality) not in supported:
            words = " and ".join(modality.word for modality in supported)
            raise invalid(field, f"the model {self._checkpoint.name} does not take this kind of media; it takes {words}")
        self._check_figures(request, field)
        if request.whole_rows:
            self._check_pruned(request)
        plan = _plan(request)
        if plan.look != self._checkpoint.family.heeded(plan.look):
            text = f"the model {self._checkpoint.name} heeds no such limits of pixels or detail; leave them out"
            raise invalid(field, text, reason="NOT_SUPPORTED")
        return Planned(plan, field, request.HasField("expected_grid"))

    def _check_figures(self, request: encoder_pb2.EncodeRequest, field: str) -> None:
        """Before memory or work follows from them."""
        if not 0 < request.expected_rows <= MAX_ROWS:
            text = f"it must be the number of rows that the item was planned with, 1 to {MAX_ROWS}, got {request.expected_rows}"
            raise invalid("expected_rows", text)
        if request.whole_rows > MAX_ROWS:
            raise invalid("whole_rows", f"it must be at most {MAX_ROWS}, got {request.whole_rows}")
        check_salt(request.cache_salt)
        for name in ("min_pixels", "max_pixels"):
            if (pixels := getattr(request, name)) > self._config.max_pixels:
                raise invalid(name, f"it must be at most {self._config.max_pixels}, got {pixels}")
        frames, limit = max(len(request.frames), len(request.times)), self._config.max_video_frames
        if frames > limit or (int(request.modality) == Modality.VIDEO and not request.frames):
            text = f"{frames} frames are to be looked at; accepted are 1 to {limit}"
            raise invalid(field, text, reason="VIDEO_TOO_LONG", limit=limit, requested=frames)

    def _check_pruned(self, request: encoder_pb2.EncodeRequest) -> None:
        if not self._checkpoint.family.prunes_video or int(request.modality) != Modality.VIDEO:
            raise invalid("whole_rows", f"the model {self._checkpoint.name} has no videos that can be pruned; leave it out")
        steps, whole, left = request.expected_grid.t, request.whole_rows, request.expected_rows
        if not steps or whole % steps or not whole // steps <= left < whole:
            raise invalid("whole_rows", f"{left} of {whole} rows cannot be left of {steps} steps: at least one step's, not all")

    def _check_data(self, planned: Planned, size: int) -> None:
        if size == 0:
            raise invalid(planned.field, f"the {planned.plan.modality.word} is empty; send the bytes of a file")
        limit = self._config.max_item_bytes
        if size > limit:
            text = f"the {planned.plan.modality.word} has {size} bytes; at most {limit} are accepted"
            raise invalid(planned.field, text, reason="ITEM_TOO_LARGE", limit=limit, requested=size)

    def _check_room(self, size: int) -> None:
        pending, limit = self._store.pending_items, self._config.max_pending_items
        if pending >= limit:
            raise _full(f"the encoder has {pending} items waiting, which is its limit", limit=limit, requested=pending + 1)
        limit = self._config.max_held_bytes
        if not self._store.make_room(size, limit):
            held = self._store.held_bytes
            raise _full(f"the encoder holds {held} of at most {limit} bytes", limit=limit, requested=held + size)

    def _response(self, index: int, event: Event) -> encoder_pb2.FetchResponse | Sent:
        response = encoder_pb2.FetchResponse(item=index)
        match event:
            case Header():
                response.header.CopyFrom(self._header(event))
            case Shared():
                response.header.CopyFrom(self._header(event.header))
                at = event.address
                response.header.shared_memory.CopyFrom(
                    encoder_pb2.SharedMemory(pid=at.pid, descriptor=at.descriptor, inode=at.inode, bytes=at.nbytes)
                )
            case Chunk():
                response.chunk.feature = event.feature
                return Sent(response, put_chunk(response.chunk.rows, event.rows, event.start, event.total))
            case Ready():
                response.ready.rows = event.rows
            case Done():
                response.done.preprocess_seconds = event.preprocess_seconds
                response.done.encode_seconds = event.encode_seconds
            case ServiceError():
                response.error.CopyFrom(event.to_proto(logs.request_id.get()))
        return response

    def _header(self, header: Header) -> encoder_pb2.ItemHeader:
        return encoder_pb2.ItemHeader(
            rows=header.rows,
            grid=media_pb2.Grid(t=header.grid.t, h=header.grid.h, w=header.grid.w),
            features=[encoder_pb2.Feature(hidden_size=hidden, dtype=wire_dtype(dtype)) for hidden, dtype in header.features],
            model_fingerprint=self._checkpoint.fingerprint,
            kept_rows=header.kept,
        )


def _key(request: encoder_pb2.EncodeRequest, data: bytes) -> bytes:
    """Names what the item's rows show: its bytes, what of them is looked at and how, and for whom."""
    how = encoder_pb2.EncodeRequest()
    for field, value in request.ListFields():
        if field.name not in ("request_id", "data", "field"):
            how.MergeFrom(encoder_pb2.EncodeRequest(**{field.name: value}))
    return hashlib.sha256(hashlib.sha256(data).digest() + how.SerializeToString(deterministic=True)).digest()


def _plan(request: encoder_pb2.EncodeRequest) -> ItemPlan:
    grid = request.expected_grid
    return ItemPlan(
        Modality(request.modality),
        request.expected_rows,
        Grid(grid.t, grid.h, grid.w),
        max(request.patches, request.whole_rows, request.expected_rows),  # no row is made of less than a patch
        tiles=request.tiles,
        frames=tuple(request.frames),
        times=tuple(request.times),
        samples=request.samples,
        masked=request.masked,
        whole_rows=request.whole_rows,
        look=Look(
            request.low_detail,
            request.min_pixels if request.HasField("min_pixels") else None,
            request.max_pixels if request.HasField("max_pixels") else None,
        ),
    )


def _full(text: str, **figures: object) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, f"{text}; try again later", reason="ENCODER_FULL", metadata=figures, retry_delay=1.0
    )


def _name_request(request_id: str) -> None:
    """Use the client's request id in the logs of this call and of the work that it starts."""
    if request_id:
        logs.request_id.set(clean_request_id(request_id))
