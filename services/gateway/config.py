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
_LONGEST = 1_000_000  # seconds


@dataclass(frozen=True)
class GatewayConfig(ServiceConfig):
    """The gateway: counts, admits and routes requests, and streams the answers."""

    port: int = option(50050, "gRPC port; 0 takes a free one and logs it", least=0, most=65535)
    http_port: int = option(
        -1, "port of the OpenAI-compatible HTTP door; 0 takes a free one and logs it, -1 leaves it out", least=-1, most=65535
    )
    max_http_body_bytes: int = option(32 * MIB, "most bytes of one HTTP request's body", least=1)
    model: str = option("", "checkpoint folder or hub id; empty means the embedded model")
    served_model_name: str = option("", "the model's name in requests; empty means the checkpoint's own")
    encoder: str = option(
        "", "host:port of every encoder, or dns:name:port for all that a name has, separated by commas; empty serves text only"
    )
    llm: str = option("", "the same of every language model server; required")
    max_model_len: int = option(0, "most tokens of prompt and answer together; 0 means the checkpoint's", least=0)
    default_max_tokens: int = option(512, "most tokens of an answer, where a request does not say", least=1)
    profile: str = option("mixed", "what the next five are by default; docs/profiles.md", list(PROFILES))
    max_num_running: int = option(-1, "most requests answered at once; -1 takes the profile's", least=1)
    max_queued_requests: int = option(
        -1, "most requests waiting for admission; more are refused; -1 takes the profile's", least=0
    )
    max_passed: int = option(-1, "most requests that may pass a waiting one and delay it; -1 takes the profile's", least=0)
    kept_for_text: float = option(
        -1.0, "share of places and KV blocks that requests with media leave to texts; -1 as above", least=0, below=1
    )
    limit_mm_per_prompt: str = option("", "most media items of one request, such as image=8,video=1; empty takes the profile's")
    max_media_bytes: int = option(
        1024 * MIB, "most bytes of media of all requests, waiting or running; more are refused", least=1
    )
    api_keys: str = option("", "file of API keys, tenant:sha256[:max_requests[:max_tokens[:weight]]] a line; empty asks for none")
    max_item_bytes: int = option(20 * MIB, "most bytes of one media item", least=1)
    max_pixels: int = option(50_000_000, "most pixels of one picture or one frame", least=1)
    max_audio_seconds: float = option(600.0, "longest recording", above=0, below=_LONGEST)
    max_video_seconds: float = option(7200.0, "longest video", above=0, below=_LONGEST)
    max_video_frames: int = option(768, "most frames of one video that are looked at", least=1)
    max_video_bytes: int = option(1024 * MIB, "most bytes that those take decoded", least=1)
    max_media_packets: int = option(200_000, "most packets of one recording or video that are read; a frame is one", least=1)
    allowed_media_domains: str = option("", "hosts that media URLs may name: a.org,*.b.org,c.net:8443; * is any; empty: none")
    allowed_media_private_networks: str = option("", "networks that those may be in, besides public ones, as in 10.0.0.0/8")
    allowed_local_media_path: str = option("", "folder below which file: URLs may name media; empty: none")
    media_fetch_seconds: float = option(30.0, "time that fetching one media item may take", above=0, below=_LONGEST)
    media_redirects: int = option(3, "most redirects on the way to one", least=0, most=20)
    probe_workers: int = option(2, "processes that read recordings and videos; none run for a model that takes neither", least=1)
    probe_memory_bytes: int = option(512 * MIB, "memory that reading one file may take", least=_LEAST_MEMORY)
    probe_seconds: float = option(
        5.0, "processor time that reading one file may take; four times as long in all", above=0, below=_LONGEST
    )
    video_pruning_rate: float = option(
        0.0, "share of a video's rows that is dropped, those that change least; 0 drops none", least=0, below=1
    )
    max_text_bytes: int = option(4 * MIB, "most bytes of text in one request", least=1)
    max_messages: int = option(1024, "most messages in one request", least=1)
    max_parts: int = option(1024, "most parts in one request", least=1)

    def __post_init__(self) -> None:
        if not self.llm:
            raise ValueError("--llm is required: the host:port of one or more language model servers")
        for name, value in vars(PROFILES[self.profile]).items():
            if getattr(self, name) in (-1, ""):
                object.__setattr__(self, name, value)
        super().__post_init__()
        for name in ("encoder_addresses", "llm_addresses", "items_per_prompt", "url_policy", "tenants"):
            getattr(self, name)  # raises what is wrong with the flags behind it
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).is_dir():
            raise ValueError(f"--allowed-local-media-path must be a folder, got {self.allowed_local_media_path!r}")

    @property
    def max_held_request_bytes(self) -> float:
        """As many as media: they come as requests."""
        return self.max_media_bytes

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
