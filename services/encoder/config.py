"""The encoder's options."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.channel import MAX_MESSAGE_BYTES
from services.common.config import ServiceConfig, option

_ENVELOPE = 64 * 1024  # room in a message for everything but the media


@dataclass(frozen=True)
class EncoderConfig(ServiceConfig):
    """Triptych's encoder service: turns media into embeddings and streams them."""

    model: str = option("", "checkpoint folder or hub id; the embedded model when empty")
    dtype: str = option("auto", "element type of weights and embeddings", ["auto", "float32", "bfloat16", "float16"])
    device: str = option("auto", "where the towers run", ["auto", "cpu", "cuda"])
    threads: int = option(0, "torch threads; 0 leaves it to torch")
    decode_threads: int = option(2, "media decoded at the same time")
    max_num_batched_patches: int = option(16384, "patches that go through the towers in one batch")
    max_pending_items: int = option(256, "items accepted and not yet encoded; more are refused")
    max_held_bytes: int = option(4 * 1024**3, "media and embeddings held; more media are refused")
    max_item_bytes: int = option(20 * 1024**2, "largest file of one item")
    max_pixels: int = option(50_000_000, "largest picture, read from its header before it is decoded")
    max_chunk_bytes: int = option(1024**2, "largest chunk of rows that a Fetch may ask for")
    lease_seconds: float = option(120.0, "embeddings are dropped when nobody fetched them for this long")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 0:
            raise ValueError(f"--threads must not be negative, got {self.threads}")
        for name in (
            "decode_threads",
            "max_num_batched_patches",
            "max_pending_items",
            "max_held_bytes",
            "max_item_bytes",
            "max_pixels",
            "max_chunk_bytes",
            "lease_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
        limit = MAX_MESSAGE_BYTES - _ENVELOPE
        for name in ("max_item_bytes", "max_chunk_bytes"):
            if getattr(self, name) > limit:
                raise ValueError(f"--{name.replace('_', '-')} must fit a message of {limit} bytes, got {getattr(self, name)}")
