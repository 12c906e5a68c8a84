"""What the gateway reports beside an answer: tokens, stage times, estimates, models and load.

Frozen copies of the protos, with names for enums and None for what was not said.
"""

from dataclasses import dataclass, fields

from triptych.common.v1 import media_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens by what they stand for; `cached` of them were already computed."""

    text: int = 0
    image: int = 0
    audio: int = 0
    video: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        """Tokens in the prompt."""
        return self.text + self.image + self.audio + self.video

    @classmethod
    def from_proto(cls, proto: usage_pb2.PromptTokens) -> "PromptTokens":
        return cls(proto.text, proto.image, proto.audio, proto.video, proto.cached)


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens

    @classmethod
    def from_proto(cls, proto: usage_pb2.Usage) -> "Usage":
        details = PromptTokens.from_proto(proto.prompt_tokens_details)
        return cls(proto.prompt_tokens, proto.completion_tokens, proto.total_tokens, details)


@dataclass(frozen=True)
class StageTimes:
    """Seconds by stage; None where a stage did not happen. Stages can overlap, so their sum is no total."""

    probe: float | None = None
    queue: float | None = None
    fetch: float | None = None
    preprocess: float | None = None
    encode: float | None = None
    transfer: float | None = None
    wait_for_rows: float | None = None
    prefill: float | None = None
    decode: float | None = None

    @classmethod
    def from_proto(cls, proto: usage_pb2.StageTimes) -> "StageTimes":
        return cls(**{descriptor.name: value for descriptor, value in proto.ListFields()})


@dataclass(frozen=True)
class MediaEstimate:
    """What one media item costs, from its headers: `tokens` prompt tokens; width and height in pixels."""

    modality: str
    tokens: int
    width: int | None
    height: int | None
    grid: tuple[int, int, int] | None
    field: str

    @classmethod
    def from_proto(cls, proto: gateway_pb2.MediaEstimate) -> "MediaEstimate":
        return cls(
            modality=modality_name(proto.modality),
            tokens=proto.tokens,
            width=proto.width if proto.HasField("width") else None,
            height=proto.height if proto.HasField("height") else None,
            grid=(proto.grid.t, proto.grid.h, proto.grid.w) if proto.HasField("grid") else None,
            field=proto.field,
        )


@dataclass(frozen=True)
class Cost:
    """What a request reserves; of patches and prefill, what is not known to be there already."""

    encoder_patches: int
    prefill_tokens: int
    kv_blocks: int
    host_bytes: int


@dataclass(frozen=True)
class Estimate:
    """A conversation's tokens, counted without running a model."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokens
    media: tuple[MediaEstimate, ...]
    cost: Cost
    max_model_len: int

    @classmethod
    def from_proto(cls, proto: gateway_pb2.EstimateTokensResponse) -> "Estimate":
        cost = proto.cost
        return cls(
            prompt_tokens=proto.prompt_tokens,
            prompt_tokens_details=PromptTokens.from_proto(proto.prompt_tokens_details),
            media=tuple(MediaEstimate.from_proto(item) for item in proto.media),
            cost=Cost(cost.encoder_patches, cost.prefill_tokens, cost.kv_blocks, cost.host_bytes),
            max_model_len=proto.max_model_len,
        )


@dataclass(frozen=True)
class Model:
    """A served model; prompt and answer together have at most `max_model_len` tokens."""

    name: str
    family: str
    max_model_len: int
    modalities: tuple[str, ...]

    @classmethod
    def from_proto(cls, proto: gateway_pb2.Model) -> "Model":
        return cls(proto.name, proto.family, proto.max_model_len, tuple(map(modality_name, proto.modalities)))


@dataclass(frozen=True)
class Load:
    """The gateway's load."""

    running_requests: int
    queued_requests: int
    reserved_kv_blocks: int
    total_kv_blocks: int
    tasks: int
    finished_requests: int

    @classmethod
    def from_proto(cls, proto: gateway_pb2.GetLoadResponse) -> "Load":
        return cls(**{field.name: getattr(proto, field.name) for field in fields(cls)})


def modality_name(modality: media_pb2.Modality.ValueType) -> str:
    """'image', 'audio' or 'video'; the number for one that this SDK does not know."""
    if modality not in media_pb2.Modality.values():
        return str(modality)
    return media_pb2.Modality.Name(modality).removeprefix("MODALITY_").lower()
