"""The one validator behind every door: a ``ChatRequest`` to a :class:`Conversation`, or an error that names the field.

Looks at counts, lengths and ranges, never into media.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import ServiceError, invalid
from services.common.salts import check_salt
from services.gateway.config import GatewayConfig
from services.gateway.model import ServedModel
from services.gateway.sampling import Sampling, read_sampling
from services.models.media import AS_SET, Look, Modality
from triptych.gateway.v1 import gateway_pb2

_ROLES = {gateway_pb2.ROLE_SYSTEM: "system", gateway_pb2.ROLE_USER: "user", gateway_pb2.ROLE_ASSISTANT: "assistant"}
_DETAILS = (gateway_pb2.DETAIL_UNSPECIFIED, gateway_pb2.DETAIL_AUTO, gateway_pb2.DETAIL_LOW, gateway_pb2.DETAIL_HIGH)
_MEDIA = {modality.word: modality for modality in Modality}


@dataclass(frozen=True)
class MediaPart:
    """A media item as it came: its bytes, or a URL, and how closely to look at it."""

    field: str
    modality: Modality
    source: bytes | str
    look: Look = AS_SET


@dataclass(frozen=True)
class Message:
    """One turn: who speaks and, in order, texts and media."""

    role: str
    parts: tuple[str | MediaPart, ...]


@dataclass(frozen=True)
class Conversation:
    """A request that is well formed."""

    messages: tuple[Message, ...]
    sampling: Sampling
    cache_salt: str = ""


class Validator:
    """Checks requests against the model and the operator's limits."""

    def __init__(self, model: ServedModel, config: GatewayConfig) -> None:
        self._model, self._config = model, config

    def read(self, request: gateway_pb2.ChatRequest | gateway_pb2.EstimateTokensRequest) -> Conversation:
        """The conversation that a request holds.

        Raises:
            ServiceError: NOT_FOUND for another model's name, else INVALID_ARGUMENT.
        """
        self._model.check_called(request.model)
        self._check_counts(request.messages)
        messages = tuple(self._message(message, f"messages[{i}]") for i, message in enumerate(request.messages))
        self._check_totals(messages)
        sampling = read_sampling(request.sampling, self._model.checkpoint.generation, self._model.vocab_size)
        check_salt(request.cache_salt)
        return Conversation(messages, sampling, request.cache_salt)

    def _check_counts(self, messages: Sequence[gateway_pb2.Message]) -> None:
        if not messages:
            raise invalid("messages", "is empty; send at least one message with role user")
        if len(messages) > self._config.max_messages:
            raise _over("messages", len(messages), self._config.max_messages, "messages")
        if (parts := sum(len(message.parts) for message in messages)) > self._config.max_parts:
            raise _over("messages", parts, self._config.max_parts, "parts")

    def _check_totals(self, messages: Sequence[Message]) -> None:
        parts = [part for message in messages for part in message.parts]
        size = sum(len(part.encode()) for part in parts if isinstance(part, str))
        if size > self._config.max_text_bytes:
            raise _over("messages", size, self._config.max_text_bytes, "bytes of text")
        for modality, count in Counter(part.modality for part in parts if isinstance(part, MediaPart)).items():
            limit = self._config.items_per_prompt.get(modality, count)
            if count > limit:
                raise _over("messages", count, limit, f"{modality.word} parts")

    def _message(self, message: gateway_pb2.Message, field: str) -> Message:
        if message.role not in _ROLES:
            raise invalid(f"{field}.role", f"must be system, user or assistant, got {message.role}")
        if not message.parts:
            raise invalid(f"{field}.parts", "is empty; send at least one part")
        return Message(_ROLES[message.role], tuple(self._part(p, f"{field}.parts[{i}]") for i, p in enumerate(message.parts)))

    def _part(self, part: gateway_pb2.Part, field: str) -> str | MediaPart:
        content = part.WhichOneof("content")
        if content is None:
            raise invalid(field, "holds nothing that this service knows; set text, image, audio or video")
        if content == "text":
            return part.text
        field, modality = f"{field}.{content}", _MEDIA[content]
        if modality not in self._model.modalities:
            takes = " and ".join(["text", *(m.word for m in self._model.modalities)])
            text = f"{content} is not something that {self._model.name} takes here; it takes {takes}"
            raise invalid(field, text, reason="MODALITY_NOT_SUPPORTED")
        media: gateway_pb2.Media = getattr(part, content)
        source = media.WhichOneof("source")
        if source is None:
            raise invalid(field, "holds neither data nor url; set one of them")
        return MediaPart(field, modality, media.data if source == "data" else media.url, self._look(media, field, modality))

    def _look(self, media: gateway_pb2.Media, field: str, modality: Modality) -> Look:
        """How closely to look at an item; what its family does not know at all is refused."""
        if media.detail not in _DETAILS:
            raise invalid(f"{field}.detail", f"must be auto, low or high, got {media.detail}")
        if modality is not Modality.IMAGE and media.detail in (gateway_pb2.DETAIL_LOW, gateway_pb2.DETAIL_HIGH):
            raise invalid(f"{field}.detail", "is of pictures only; leave it out", reason="NOT_SUPPORTED")
        limits = {name: getattr(media, name) for name in ("min_pixels", "max_pixels") if media.HasField(name)}
        for name, pixels in limits.items():
            if modality is Modality.AUDIO or not self._model.checkpoint.family.any_size:
                text = f"is of pictures and video of families that take any size, which this {self._model.family} model is not"
                raise invalid(f"{field}.{name}", f"{text}; leave it out", reason="NOT_SUPPORTED")
            if not 1 <= pixels <= self._config.max_pixels:
                text = f"must be 1 to {self._config.max_pixels}, got {pixels}"
                raise invalid(f"{field}.{name}", text, reason="OUT_OF_RANGE", limit=self._config.max_pixels, requested=pixels)
        look = Look(media.detail == gateway_pb2.DETAIL_LOW, **limits)
        if look.min_pixels and look.max_pixels and look.min_pixels > look.max_pixels:
            raise invalid(f"{field}.min_pixels", f"must be at most max_pixels = {look.max_pixels}, got {look.min_pixels}")
        return look


def _over(field: str, count: int, limit: int, what: str) -> ServiceError:
    return invalid(field, f"{count} {what}, the limit is {limit}; send less", reason="TOO_MANY", limit=limit, requested=count)
