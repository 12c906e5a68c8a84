"""Puts the encoder together; what :func:`services.common.server.serve` runs."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import numpy as np
import torch
from PIL import Image

from services.common import logs
from services.common.server import Readiness
from services.encoder.batcher import Batcher
from services.encoder.config import EncoderConfig
from services.encoder.decode import decode_image
from services.encoder.pipeline import Pipeline, Planned
from services.encoder.preprocess import Decoded, Prepared, Preprocessor
from services.encoder.servicer import EncoderServicer
from services.encoder.store import Store
from services.encoder.towers import Towers
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Clip, ItemPlan, Modality, Picture, Recording
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc

logger = logging.getLogger(__name__)
WARM_UP_SIDE = 64  # pixels
WARM_UP_SAMPLES = 16000


class EncoderService:
    """The encoder half of one checkpoint. A checkpoint that takes no media is served too: it refuses every item.

    Raises:
        UnsupportedModel: the checkpoint cannot be served.
    """

    name = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name
    open_while_draining = frozenset({"Fetch", "Release"})

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self._checkpoint = open_checkpoint(config.model)
        self._store = Store(config.lease_seconds)
        self._servicer = EncoderServicer(self._checkpoint, config, self._store)

    def register(self, server: grpc.aio.Server) -> None:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self._servicer, server)

    async def start(self, readiness: Readiness, address: str) -> None:
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        if self._checkpoint.family.encoded:
            started = time.perf_counter()
            preprocessor, towers = await asyncio.to_thread(self._load)
            self._servicer.pipeline = self._pipeline(preprocessor, towers)
            self._servicer.parameter_bytes = towers.parameter_bytes
            seconds = round(time.perf_counter() - started, 3)
            logs.event(logger, "loaded", model=self._checkpoint.name, parameter_bytes=towers.parameter_bytes, seconds=seconds)
        else:
            logs.event(logger, "nothing to load, the model takes no media", model=self._checkpoint.name)
        await readiness.set(True)

    async def settled(self) -> None:
        """Wait until every ref that was handed out is released or its lease is over."""
        await self._store.empty.wait()

    async def stop(self) -> None:
        if self._servicer.pipeline is not None:
            await self._servicer.pipeline.stop()

    def _load(self) -> tuple[Preprocessor, Towers]:
        """Load both, and encode one blank item of each kind: what cannot work fails here and not at the first request."""
        preprocessor = Preprocessor(self._checkpoint, self._checkpoint.family.encoded)
        towers = Towers(self._checkpoint, self._config.dtype, self._config.device)
        for modality in self._checkpoint.family.encoded:
            towers.encode([preprocessor(*blank(self._checkpoint, modality))])
        return preprocessor, towers

    def _pipeline(self, preprocessor: Preprocessor, towers: Towers) -> Pipeline:
        def prepare(data: bytes, planned: Planned) -> Prepared:
            assert planned.plan.modality is Modality.IMAGE, "the servicer takes what the family's entry says is encoded"
            picture = decode_image(data, planned.field, self._config.max_pixels, preprocessor.check_size)
            return preprocessor(picture, planned.plan)

        batcher = Batcher(towers.encode, self._config.max_num_batched_patches)
        return Pipeline(self._store, batcher, prepare, self._config.decode_threads)


def blank(checkpoint: Checkpoint, modality: Modality) -> tuple[Decoded, ItemPlan]:
    """A small item that shows or says nothing, decoded, and its plan."""
    side = WARM_UP_SIDE
    match modality:
        case Modality.IMAGE:
            return Image.new("RGB", (side, side)), checkpoint.plan([Picture(side, side)])[0]
        case Modality.AUDIO:
            return np.zeros(WARM_UP_SAMPLES, np.float32), checkpoint.plan([Recording(WARM_UP_SAMPLES)])[0]
        case Modality.VIDEO:
            (plan,) = checkpoint.plan([Clip(side, side, 4, 2.0)])
            return np.zeros((len(plan.frames), side, side, 3), np.uint8), plan
