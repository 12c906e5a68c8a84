"""From a conversation to a prompt: media are probed, then the text is laid out around them. Blocking; run it in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from services.common.errors import invalid
from services.gateway.config import GatewayConfig
from services.gateway.data_url import read_data_url, too_many_bytes
from services.gateway.model import ServedModel
from services.gateway.probe import ImageFacts, probe_image
from services.gateway.sampling import Sampling
from services.gateway.validator import Conversation, MediaPart
from services.models.image_sizes import UnsupportedSize
from services.models.layout import Placement, Turn
from services.models.media import ItemPlan, Modality, Picture
from services.models.tokenizer import ChatTemplateError


@dataclass(frozen=True)
class Item:
    """One media item: its bytes, what its headers say, what it will cost and the runs of placeholders that stand for it."""

    field: str
    data: bytes
    facts: ImageFacts
    plan: ItemPlan
    placements: tuple[Placement, ...]

    @property
    def tokens(self) -> int:
        """Prompt tokens that stand for it."""
        return sum(place.tokens for place in self.placements)


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be let in; items are in prompt order."""

    token_ids: list[int]
    items: tuple[Item, ...]
    sampling: Sampling

    @property
    def patches(self) -> int:
        """Patches that go through the encoder's towers."""
        return sum(item.plan.patches for item in self.items)

    @property
    def media_bytes(self) -> int:
        """Bytes of all items."""
        return sum(len(item.data) for item in self.items)

    def tokens_of(self, modality: Modality) -> int:
        """Prompt tokens that stand for this modality."""
        return sum(item.tokens for item in self.items if item.plan.modality is modality)

    @property
    def text_tokens(self) -> int:
        """Prompt tokens that stand for no medium."""
        return len(self.token_ids) - sum(item.tokens for item in self.items)


class PromptMaker:
    """Makes prompts for one model."""

    def __init__(self, model: ServedModel, config: GatewayConfig) -> None:
        self._model, self._config = model, config

    def make(self, conversation: Conversation) -> Prompt:
        """Probe and lay out.

        Raises:
            ServiceError: INVALID_ARGUMENT about a media part or about the conversation's shape.
        """
        media: list[tuple[str, bytes, ImageFacts]] = []
        for part in (part for message in conversation.messages for part in message.parts if not isinstance(part, str)):
            data = self._bytes_of(part)
            media.append((part.field, data, probe_image(data, part.field, max_pixels=self._config.max_pixels)))
        plans = self._plan(media)
        rest = iter(plans)
        turns = [
            Turn(message.role, tuple(part if isinstance(part, str) else next(rest) for part in message.parts))
            for message in conversation.messages
        ]
        try:
            layout = self._model.layout.lay_out(turns)
        except ChatTemplateError as error:
            raise invalid("messages", f"the model's chat template refuses the conversation: {error}") from None
        items = []
        for number, places in groupby(layout.placements, key=lambda place: place.item):
            field, data, facts = media[number]
            items.append(Item(field, data, facts, plans[number], tuple(places)))
        return Prompt(layout.token_ids, tuple(items), conversation.sampling)

    def _bytes_of(self, part: MediaPart) -> bytes:
        limit = self._config.max_item_bytes
        if isinstance(part.source, str):
            return read_data_url(part.source, part.field, max_bytes=limit)
        if len(part.source) > limit:
            raise too_many_bytes(part.field, limit)
        return part.source

    def _plan(self, media: list[tuple[str, bytes, ImageFacts]]) -> list[ItemPlan]:
        try:
            return self._model.checkpoint.plan([Picture(facts.width, facts.height) for _, _, facts in media])
        except UnsupportedSize as error:
            raise invalid(media[error.item][0], str(error), reason="BAD_MEDIA") from None
