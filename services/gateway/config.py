"""The gateway's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.config import ServiceConfig, option
from services.gateway.addresses import parse_addresses
from services.models.media import Modality

MIB = 1024 * 1024
_LEAST_MEMORY = 64 * MIB  # what demuxers and decoders take for a file of any size
_LONGEST = 1e6  # seconds


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """The gateway: counts, admits and routes requests, and streams the answers."""

    port: int = option(50050, "gRPC port; 0 takes a free one and logs it")
    model: str = option("", "checkpoint folder or hub id; empty means the embedded model")
    served_model_name: str = option("", "the model's name in requests; empty means the checkpoint's own")
    encoder: str = option(
        "", "host:port of every encoder, or dns:name:port for all that a name has, separated by commas; empty serves text only"
    )
    llm: str = option("", "the same of every language model server; required")
    max_model_len: int = option(0, "most tokens of prompt and answer together; 0 means the checkpoint's")
    default_max_tokens: int = option(512, "most tokens of an answer, where a request does not say")
    max_num_running: int = option(256, "most requests answered at once")
    max_queued_requests: int = option(256, "most requests waiting for admission; more are refused")
    max_item_bytes: int = option(20 * MIB, "most bytes of one media item")
    max_pixels: int = option(50_000_000, "most pixels of one picture or one frame")
    max_audio_seconds: float = option(600.0, "longest recording")
    max_video_frames: int = option(768, "most frames of one video that are looked at")
    max_video_bytes: int = option(1024 * MIB, "most bytes that those take decoded")
    max_media_packets: int = option(200_000, "most packets of one recording or video that are read; a frame is one")
    limit_mm_per_prompt: str = option("image=16,audio=4,video=4", "most media items of one request")
    probe_workers: int = option(2, "processes that read recordings and videos; none run for a model that takes neither")
    probe_memory_bytes: int = option(512 * MIB, "memory that reading one file may take")
    probe_seconds: float = option(5.0, "processor time that reading one file may take; four times as long in all")
    video_pruning_rate: float = option(0.0, "share of a video's rows that is dropped, those that change least; 0 drops none")
    max_text_bytes: int = option(4 * MIB, "most bytes of text in one request")
    max_messages: int = option(1024, "most messages in one request")
    max_parts: int = option(1024, "most parts in one request")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.llm:
            raise ValueError("--llm is required: the host:port of one or more language model servers")
        for flag, value in (("--encoder", self.encoder), ("--llm", self.llm)):
            parse_addresses(flag, value)
        _limits(self.limit_mm_per_prompt)
        for flag, seconds in (("--max-audio-seconds", self.max_audio_seconds), ("--probe-seconds", self.probe_seconds)):
            if not 0 < seconds < _LONGEST:
                raise ValueError(f"{flag} must be more than 0 and less than {_LONGEST:.0f}, got {seconds}")
        if not 0 <= self.video_pruning_rate < 1:
            raise ValueError(f"--video-pruning-rate must be at least 0 and less than 1, got {self.video_pruning_rate}")
        for name, value in vars(self).items():
            least = int(name.startswith(("max_", "default_")) and name not in ("max_model_len", "max_queued_requests"))
            least = 1 if name == "probe_workers" else _LEAST_MEMORY if name == "probe_memory_bytes" else least
            if isinstance(value, int) and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")

    @property
    def encoder_addresses(self) -> tuple[str, ...]:
        """Every encoder's host:port or dns:name:port."""
        return parse_addresses("--encoder", self.encoder)

    @property
    def llm_addresses(self) -> tuple[str, ...]:
        """The same of every language model server."""
        return parse_addresses("--llm", self.llm)

    @property
    def items_per_prompt(self) -> Mapping[Modality, int]:
        """Most items of each modality; one that is not named has no limit of its own."""
        return _limits(self.limit_mm_per_prompt)


def _limits(text: str) -> dict[Modality, int]:
    words = {modality.word: modality for modality in Modality}
    limits = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        word, _, number = entry.partition("=")
        if word not in words or not number.isdecimal():
            raise ValueError(f"--limit-mm-per-prompt must look like image=16,video=1 with {', '.join(words)}; got {entry!r}")
        limits[words[word]] = int(number)
    return limits
