"""The encoder's options."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.channel import MAX_MESSAGE_BYTES
from services.common.config import ServiceConfig, option

_LEAST_MEMORY = 64 * 1024**2  # what decoders take for a file of any size
_ENVELOPE = 64 * 1024  # room in a message for everything but the media


@dataclass(frozen=True)
class EncoderConfig(ServiceConfig):
    """Triptych's encoder service: turns media into embeddings and streams them."""

    model: str = option("", "checkpoint folder or hub id; the embedded model when empty")
    dtype: str = option("auto", "element type of weights and embeddings", ["auto", "float32", "bfloat16", "float16"])
    device: str = option("auto", "where the towers run", ["auto", "cpu", "cuda"])
    threads: int = option(0, "torch threads; 0 leaves it to torch")
    decode_workers: int = option(2, "processes that decode media, and threads that prepare what comes of them")
    decode_memory_bytes: int = option(2 * 1024**3, "memory that decoding one file may take")
    decode_seconds: float = option(20.0, "processor time that decoding one file may take; four times as long in all")
    max_num_batched_patches: int = option(16384, "patches that go through the towers in one batch")
    max_pending_items: int = option(256, "items accepted and not yet encoded; more are refused")
    max_held_bytes: int = option(4 * 1024**3, "media and embeddings held; more media are refused")
    embedding_cache_bytes: int = option(1024**3, "embeddings kept that nobody holds, until there is no room; part of those held")
    fleet_cache_url: str = option("", "redis:// URL of a Valkey or Redis server in which encoders share embeddings; empty: none")
    fleet_cache_max_item_bytes: int = option(64 * 1024**2, "embeddings of one item that are kept there")
    fleet_cache_seconds: float = option(3600.0, "they are kept there for so long")
    fleet_cache_timeout: float = option(0.5, "seconds that one call of that server may take")
    shared_memory: str = option("auto", "whether language models on this host read embeddings where they lie", ["auto", "off"])
    max_item_bytes: int = option(20 * 1024**2, "largest file of one item")
    max_pixels: int = option(50_000_000, "largest picture, read from its header before it is decoded")
    max_audio_seconds: float = option(600.0, "longest recording, as much of it as the model hears")
    max_video_frames: int = option(768, "most frames of a video that are looked at")
    max_chunk_bytes: int = option(1024**2, "largest chunk of rows that a Fetch may ask for")
    lease_seconds: float = option(120.0, "embeddings are dropped when nobody fetched them for this long")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")
        if self.fleet_cache_url and not self.fleet_cache_url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("--fleet-cache-url must look like redis://host:6379/0, rediss://... or unix:///path/to/socket")
        if self.embedding_cache_bytes < 0:
            raise ValueError(f"--embedding-cache-bytes must not be negative, got {self.embedding_cache_bytes}")
        for name in (
            "decode_workers",
            "decode_memory_bytes",
            "decode_seconds",
            "max_num_batched_patches",
            "max_pending_items",
            "max_held_bytes",
            "max_item_bytes",
            "max_pixels",
            "max_audio_seconds",
            "max_video_frames",
            "max_chunk_bytes",
            "lease_seconds",
            "fleet_cache_max_item_bytes",
            "fleet_cache_seconds",
            "fleet_cache_timeout",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
        if self.decode_memory_bytes < _LEAST_MEMORY:
            raise ValueError(f"--decode-memory-bytes must be at least {_LEAST_MEMORY}, got {self.decode_memory_bytes}")
        limit = MAX_MESSAGE_BYTES - _ENVELOPE
        for name in ("max_item_bytes", "max_chunk_bytes"):
            if getattr(self, name) > limit:
                raise ValueError(f"--{name.replace('_', '-')} must fit a message of {limit} bytes, got {getattr(self, name)}")
