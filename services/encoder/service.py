"""Puts the encoder together; what :func:`services.common.server.serve` runs."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import numpy as np
import torch

from services.common import logs
from services.common.errors import invalid
from services.common.server import Readiness
from services.common.shared_memory import descriptors
from services.decoding.pool import DecodePool
from services.decoding.process import Limits
from services.decoding.specs import Decoded, ImageSpec, SoundSpec, Spec, VideoSpec
from services.encoder.batcher import Batcher
from services.encoder.config import EncoderConfig
from services.encoder.fleet_cache import FleetCache
from services.encoder.gpu_jpeg import GpuJpeg
from services.encoder.pipeline import Pipeline, Planned
from services.encoder.preprocess import Decoded as Medium
from services.encoder.preprocess import Prepared, Preprocessor
from services.encoder.sent import add_to_server
from services.encoder.servicer import EncoderServicer
from services.encoder.store import Store
from services.encoder.towers import Towers
from services.models.audio_lengths import RATE
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Clip, ItemPlan, Modality, Picture, Recording
from triptych.encoder.v1 import encoder_pb2

logger = logging.getLogger(__name__)
WARM_UP_SIDE = 64  # pixels
WARM_UP_SAMPLES = 16000
_WALL = 4  # times the processor time, for a machine that is busy


class EncoderService:
    """The encoder half of one checkpoint. A checkpoint that takes no media is served too: it refuses every item.

    Raises:
        UnsupportedModel: the checkpoint cannot be served.
    """

    name = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name
    open_while_draining = frozenset({"Fetch", "Release"})
    standing: frozenset[str] = frozenset()

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self._checkpoint = open_checkpoint(config.model)
        shared = descriptors() // 2 if config.shared_memory == "auto" else 0  # the others are for calls and decoding
        self.store = Store(config.lease_seconds, config.embedding_cache_bytes, shared_items=shared)
        self.servicer = EncoderServicer(self._checkpoint, config, self.store)
        limits = Limits(config.decode_memory_bytes, config.decode_seconds, _WALL * config.decode_seconds)
        self._pool = DecodePool(config.decode_workers, limits, config.max_pending_items)

    def register(self, server: grpc.aio.Server) -> None:
        add_to_server(self.servicer, server)

    async def start(self, readiness: Readiness, address: str) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        if self._checkpoint.family.modalities:
            started = time.perf_counter()
            (preprocessor, towers), _ = await asyncio.gather(asyncio.to_thread(self._load), self._pool.start())
            self.servicer.pipeline = self._pipeline(preprocessor, towers)
            self.servicer.parameter_bytes = towers.parameter_bytes
            seconds = round(time.perf_counter() - started, 3)
            logs.event(logger, "loaded", model=self._checkpoint.name, parameter_bytes=towers.parameter_bytes, seconds=seconds)
        else:
            logs.event(logger, "nothing to load, the model takes no media", model=self._checkpoint.name)
        await readiness.set(True)

    async def settled(self) -> None:
        """Wait until every ref that was handed out is released or its lease is over."""
        await self.store.empty.wait()

    async def stop(self) -> None:
        if self.servicer.pipeline is not None:
            await self.servicer.pipeline.stop()
        await self._pool.stop()

    def _load(self) -> tuple[Preprocessor, Towers]:
        """Load both, and encode one blank item of each kind: what cannot work fails here and not at the first request."""
        preprocessor = Preprocessor(self._checkpoint, self._checkpoint.family.modalities)
        towers = Towers(self._checkpoint, self._config.dtype, self._config.device)
        for modality in self._checkpoint.family.modalities:
            towers.encode([preprocessor(*blank(self._checkpoint, modality))])
        return preprocessor, towers

    def _pipeline(self, preprocessor: Preprocessor, towers: Towers) -> Pipeline:
        gpu_jpeg = GpuJpeg(self._config.max_pixels) if self._config.jpeg_decoder == "gpu" else None

        async def decode(planned: Planned, data: bytes) -> Decoded:
            if gpu_jpeg is not None and planned.plan.modality is Modality.IMAGE:
                pixels = await asyncio.to_thread(gpu_jpeg, data)
                if pixels is not None:
                    return Decoded(pixels)
            return await self._pool.decode(data, _spec(planned, self._config), planned.field)

        def preprocess(planned: Planned, decoded: Decoded) -> Prepared:
            if planned.plan.modality is Modality.IMAGE:
                height, width, _ = decoded.array.shape
                try:
                    preprocessor.check_size(width, height)
                except ValueError as error:
                    raise invalid(planned.field, str(error)) from None
            return preprocessor(decoded.array, planned.plan)

        batcher = Batcher(towers.encode, min(self._config.max_num_batched_patches, towers.batch_patches))
        at_once, fleet = self._config.decode_workers, self._fleet(towers)
        return Pipeline(self.store, batcher, decode, preprocess, towers.split, at_once, fleet)

    def _fleet(self, towers: Towers) -> FleetCache | None:
        """What all encoders of one checkpoint, element type and decoder of JPEGs share: all of them change rows."""
        config = self._config
        if not config.fleet_cache_url:
            return None
        return FleetCache(
            config.fleet_cache_url,
            f"{self._checkpoint.fingerprint}:{towers.dtype}:{config.jpeg_decoder}",
            max_bytes=config.fleet_cache_max_item_bytes,
            seconds=config.fleet_cache_seconds,
            timeout=config.fleet_cache_timeout,
        )


def blank(checkpoint: Checkpoint, modality: Modality) -> tuple[Medium, ItemPlan]:
    """A small item that shows or says nothing, decoded, and its plan."""
    side = WARM_UP_SIDE
    match modality:
        case Modality.IMAGE:
            return np.zeros((side, side, 3), np.uint8), checkpoint.plan([Picture(side, side)])[0]
        case Modality.AUDIO:
            return np.zeros(WARM_UP_SAMPLES, np.float32), checkpoint.plan([Recording(WARM_UP_SAMPLES)])[0]
        case Modality.VIDEO:
            (plan,) = checkpoint.plan([Clip(side, side, 4, 2.0)])
            return np.zeros((len(plan.frames), side, side, 3), np.uint8), plan


def _spec(planned: Planned, config: EncoderConfig) -> Spec:
    """What decoding an item has to yield; a ServiceError where that is more than this encoder does."""
    if planned.plan.modality is Modality.IMAGE:
        return ImageSpec(config.max_pixels)
    if planned.plan.modality is Modality.AUDIO:
        limit = int(config.max_audio_seconds * RATE)
        if planned.plan.samples > limit:
            text = f"{planned.plan.samples} samples at {RATE} a second are to be heard; at most {limit} are accepted"
            raise invalid(planned.field, text, reason="AUDIO_TOO_LONG", limit=limit, requested=planned.plan.samples)
        return SoundSpec(limit, planned.plan.samples or None, RATE)
    # half of the memory is left to the decoder
    return VideoSpec(planned.plan.frames, config.max_pixels, config.decode_memory_bytes // 2)
