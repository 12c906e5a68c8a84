"""Media of a request: their bytes and a digest, and what is read of each before it is planned.

Pictures are read here, from their headers. Recordings and videos are demuxed in worker processes, which may die of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.decoding.pool import DecodePool
from services.decoding.process import Limits
from services.decoding.specs import SoundFactsSpec, VideoFactsSpec
from services.gateway.background import side_by_side
from services.gateway.config import GatewayConfig
from services.gateway.data_url import read_data_url, too_many_bytes
from services.gateway.model import ServedModel
from services.gateway.probe import probe_image
from services.gateway.url_fetch import Fetcher
from services.gateway.validator import Conversation, MediaPart
from services.models.audio_lengths import RATE
from services.models.media import AS_SET, Clip, Look, Medium, Modality, Picture, Recording

_WALL = 4.0  # seconds that pass, at most, for one of processor time
_WAITING = 256  # files that may wait to be probed


@dataclass(frozen=True)
class File:
    """One media item as it came: where in the request, its bytes and their SHA-256."""

    field: str
    modality: Modality
    data: bytes
    digest: bytes
    picture: Picture | None = None
    look: Look = AS_SET


@dataclass(frozen=True)
class Probed:
    """A file and what its headers or packets say."""

    file: File
    medium: Medium


class Probe:
    """Reads the facts of media files. Recordings and videos need it started, which is of no effect where a model takes none.

    Attributes:
        fetcher: gets files that a conversation names by URL.
    """

    def __init__(self, model: ServedModel, config: GatewayConfig) -> None:
        self._config = config
        self.fetcher = Fetcher(config)
        limits = Limits(config.probe_memory_bytes, config.probe_seconds, _WALL * config.probe_seconds)
        needed = bool({Modality.AUDIO, Modality.VIDEO} & set(model.modalities))
        self._pool = DecodePool(config.probe_workers, limits, _WAITING) if needed else None
        self._sound = SoundFactsSpec(int(config.max_audio_seconds * RATE), config.max_media_packets, RATE)
        self._video = VideoFactsSpec(config.max_pixels, config.max_media_packets)

    async def start(self) -> None:
        """Start the workers.

        Raises:
            WorkerLost, OSError: one does not start.
        """
        if self._pool is not None:
            await self._pool.start()

    async def stop(self) -> None:
        """End them."""
        if self._pool is not None:
            await self._pool.stop()

    def files(self, conversation: Conversation) -> list[File]:
        """The media of a conversation, pictures probed. Blocking; run it in a thread.

        Raises:
            ServiceError: INVALID_ARGUMENT about a media part.
        """
        parts = (part for message in conversation.messages for part in message.parts)
        return [self._file(part) for part in parts if isinstance(part, MediaPart)]

    async def facts(self, files: Sequence[File]) -> list[Probed]:
        """What is known of each file, recordings and videos side by side.

        Raises:
            ServiceError: INVALID_ARGUMENT about the first file that is refused; RESOURCE_EXHAUSTED or UNAVAILABLE, try again.
        """
        return list(map(Probed, files, await side_by_side(map(self._medium, files))))

    def _file(self, part: MediaPart) -> File:
        limit = self._config.max_item_bytes
        data = read_data_url(part.source, part.field, max_bytes=limit) if isinstance(part.source, str) else part.source
        if len(data) > limit:
            raise too_many_bytes(part.field, limit)
        picture = None
        if part.modality is Modality.IMAGE:
            picture = replace(probe_image(data, part.field, max_pixels=self._config.max_pixels), look=part.look)
        return File(part.field, part.modality, data, hashlib.sha256(data).digest(), picture, part.look)

    async def _medium(self, file: File) -> Medium:
        if file.picture is not None:
            return file.picture
        assert self._pool is not None, "the validator let through what the model does not take"
        if file.modality is Modality.AUDIO:
            length = await self._pool.decode(file.data, self._sound, file.field)
            return Recording(int(length.array[0]))
        shown = await self._pool.decode(file.data, self._video, file.field)
        facts, times = shown.facts, tuple(shown.array.tolist())
        return Clip(facts.width, facts.height, len(times), facts.fps, times, file.look)
