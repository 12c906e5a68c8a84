"""The gateway's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.common.config import ServiceConfig, option
from services.gateway.addresses import parse_addresses
from services.gateway.allowed_urls import UrlPolicy
from services.gateway.profiles import PROFILES
from services.gateway.tenants import Tenants, read_tenants
from services.models.media import Modality

MIB = 1024 * 1024
_LEAST_MEMORY = 64 * MIB  # what demuxers and decoders take for a file of any size
_LONGEST = 1e6  # seconds


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """The gateway: counts, admits and routes requests, and streams the answers."""

    port: int = option(50050, "gRPC port; 0 takes a free one and logs it")
    http_port: int = option(-1, "port of the OpenAI-compatible HTTP door; 0 takes a free one and logs it, -1 leaves it out")
    max_http_body_bytes: int = option(32 * MIB, "most bytes of one HTTP request's body")
    model: str = option("", "checkpoint folder or hub id; empty means the embedded model")
    served_model_name: str = option("", "the model's name in requests; empty means the checkpoint's own")
    encoder: str = option(
        "", "host:port of every encoder, or dns:name:port for all that a name has, separated by commas; empty serves text only"
    )
    llm: str = option("", "the same of every language model server; required")
    max_model_len: int = option(0, "most tokens of prompt and answer together; 0 means the checkpoint's")
    default_max_tokens: int = option(512, "most tokens of an answer, where a request does not say")
    profile: str = option("mixed", "what the next five are by default; docs/profiles.md", list(PROFILES))
    max_num_running: int = option(-1, "most requests answered at once; -1 takes the profile's")
    max_queued_requests: int = option(-1, "most requests waiting for admission; more are refused; -1 takes the profile's")
    max_passed: int = option(-1, "most requests that may pass a waiting one and delay it; -1 takes the profile's")
    kept_for_text: float = option(-1.0, "share of places and KV blocks that requests with media leave to texts; -1 as above")
    limit_mm_per_prompt: str = option("", "most media items of one request, such as image=8,video=1; empty takes the profile's")
    max_media_bytes: int = option(1024 * MIB, "most bytes of media of all requests, waiting or running; more are refused")
    api_keys: str = option("", "file of API keys, tenant:sha256[:max_requests[:max_tokens[:weight]]] a line; empty asks for none")
    max_item_bytes: int = option(20 * MIB, "most bytes of one media item")
    max_pixels: int = option(50_000_000, "most pixels of one picture or one frame")
    max_audio_seconds: float = option(600.0, "longest recording")
    max_video_seconds: float = option(7200.0, "longest video")
    max_video_frames: int = option(768, "most frames of one video that are looked at")
    max_video_bytes: int = option(1024 * MIB, "most bytes that those take decoded")
    max_media_packets: int = option(200_000, "most packets of one recording or video that are read; a frame is one")
    allowed_media_domains: str = option("", "hosts that media URLs may name: a.org,*.b.org,c.net:8443; * is any; empty: none")
    allowed_media_private_networks: str = option("", "networks that those may be in, besides public ones, as in 10.0.0.0/8")
    allowed_local_media_path: str = option("", "folder below which file: URLs may name media; empty: none")
    media_fetch_seconds: float = option(30.0, "time that fetching one media item may take")
    media_redirects: int = option(3, "most redirects on the way to one")
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
        for name, value in vars(PROFILES[self.profile]).items():
            if getattr(self, name) in (-1, ""):
                object.__setattr__(self, name, value)
        for name in ("encoder_addresses", "llm_addresses", "items_per_prompt", "url_policy", "tenants"):
            getattr(self, name)  # raises what is wrong with the flags behind it
        for name in ("max_audio_seconds", "max_video_seconds", "probe_seconds", "media_fetch_seconds"):
            if not 0 < getattr(self, name) < _LONGEST:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be more than 0 and less than {_LONGEST:.0f}, got {getattr(self, name)}")
        if not 0 <= self.media_redirects <= 20:
            raise ValueError(f"--media-redirects must be 0 to 20, got {self.media_redirects}")
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).is_dir():
            raise ValueError(f"--allowed-local-media-path must be a folder, got {self.allowed_local_media_path!r}")
        if not 0 <= self.kept_for_text < 1:
            raise ValueError(f"--kept-for-text must be at least 0 and less than 1, got {self.kept_for_text}")
        if not 0 <= self.video_pruning_rate < 1:
            raise ValueError(f"--video-pruning-rate must be at least 0 and less than 1, got {self.video_pruning_rate}")
        if not -1 <= self.http_port <= 65535:
            raise ValueError(f"--http-port must be between -1 and 65535, got {self.http_port}")
        may_be_0 = ("max_model_len", "max_queued_requests", "max_passed")
        for name, value in vars(self).items():
            least = int(name.startswith(("max_", "default_")) and name not in may_be_0)
            least = 1 if name == "probe_workers" else _LEAST_MEMORY if name == "probe_memory_bytes" else least
            if isinstance(value, int) and value < least and name != "http_port":
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")

    @cached_property
    def tenants(self) -> Tenants:
        """Whose keys are known; read once."""
        return read_tenants(self.api_keys)

    @cached_property
    def url_policy(self) -> UrlPolicy:
        """Which media may be fetched."""
        try:
            return UrlPolicy.of(self.allowed_media_domains, self.allowed_media_private_networks)
        except ValueError as error:
            raise ValueError(f"--allowed-media-domains or --allowed-media-private-networks: {error}") from None

    @cached_property
    def encoder_addresses(self) -> tuple[str, ...]:
        """Every encoder's host:port or dns:name:port."""
        return parse_addresses("--encoder", self.encoder)

    @cached_property
    def llm_addresses(self) -> tuple[str, ...]:
        """The same of every language model server."""
        return parse_addresses("--llm", self.llm)

    @cached_property
    def items_per_prompt(self) -> Mapping[Modality, int]:
        """Most items of each modality; one that is not named has no limit of its own."""
        words = {modality.word: modality for modality in Modality}
        limits = {}
        for entry in filter(None, (part.strip() for part in self.limit_mm_per_prompt.split(","))):
            word, _, number = entry.partition("=")
            if word not in words or not number.isdecimal():
                raise ValueError(f"--limit-mm-per-prompt must look like image=16,video=1 with {', '.join(words)}; got {entry!r}")
            limits[words[word]] = int(number)
        return limits
