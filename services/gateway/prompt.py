"""From a conversation and its media to a prompt: the text is laid out around them. Blocking; run it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from services.common.errors import invalid
from services.decoding.refusals import TEXTS
from services.gateway.config import GatewayConfig
from services.gateway.media import Probed
from services.gateway.model import ServedModel
from services.gateway.prefix_affinity import chain
from services.gateway.sampling import Sampling
from services.gateway.validator import Conversation
from services.models.image_sizes import UnsupportedSize
from services.models.layout import Placement, Turn
from services.models.media import Clip, ItemPlan, Medium, Modality
from services.models.tokenizer import ChatTemplateError
from services.models.video_plans import pruned


@dataclass(frozen=True)
class Item:
    """One media item: its bytes and their SHA-256, what was read of it, what it will cost and the runs of placeholders that
    stand for it."""

    field: str
    data: bytes
    digest: bytes
    medium: Medium
    plan: ItemPlan
    placements: tuple[Placement, ...]
    cache_salt: str = ""

    @property
    def tokens(self) -> int:
        """Prompt tokens that stand for it."""
        return sum(place.tokens for place in self.placements)


@dataclass(frozen=True)
class Prompt:
    """A prompt, ready to be let in; items are in prompt order. ``fetch_seconds`` went by for media that URLs name."""

    token_ids: list[int]
    items: tuple[Item, ...]
    sampling: Sampling
    cache_salt: str = ""
    fetch_seconds: float = 0.0

    @cached_property
    def beginnings(self) -> list[bytes]:
        """Names of its beginnings, media included, for :class:`services.gateway.prefix_affinity.PrefixAffinity`."""
        media = [(place.offset, item.digest) for item in self.items for place in item.placements]
        return chain(self.token_ids, media, self.cache_salt)

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

    def make(self, conversation: Conversation, media: Sequence[Probed]) -> Prompt:
        """Plan and lay out.

        Args:
            conversation: that the media are from.
            media: all of them, in order.

        Raises:
            ServiceError: INVALID_ARGUMENT about a media part or about the conversation's shape.
        """
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
            file = media[number].file
            medium, salt = media[number].medium, conversation.cache_salt
            items.append(Item(file.field, file.data, file.digest, medium, plans[number], tuple(places), salt))
        return Prompt(layout.token_ids, tuple(items), conversation.sampling, conversation.cache_salt)

    def _plan(self, media: Sequence[Probed]) -> list[ItemPlan]:
        try:
            plans = self._model.checkpoint.plan([probed.medium for probed in media])
        except UnsupportedSize as error:
            raise invalid(media[error.item].file.field, str(error), reason="BAD_MEDIA") from None
        for probed, plan in zip(media, plans, strict=True):
            if isinstance(probed.medium, Clip):
                self._check_seconds(probed.file.field, probed.medium)
                self._check_frames(probed.file.field, probed.medium, len(plan.frames))
        rate = self._config.video_pruning_rate
        return [pruned(plan, rate) if rate and plan.modality is Modality.VIDEO else plan for plan in plans]

    def _check_seconds(self, field: str, clip: Clip) -> None:
        """How long frames are shown, from the first to the end of the last."""
        seconds = (clip.times[-1] if clip.times else (clip.frames - 1) / clip.fps) + 1 / clip.fps
        limit = self._config.max_video_seconds
        if seconds > limit:
            text = f"the video lasts {seconds:.1f} seconds, the limit is {limit:g}; send a shorter one"
            raise invalid(field, text, reason="VIDEO_TOO_LONG", limit=limit, requested=f"{seconds:.1f}")

    def _check_frames(self, field: str, clip: Clip, frames: int) -> None:
        limit = self._config.max_video_frames
        if frames > limit:
            text = f"{frames} frames of the video are to be looked at, the limit is {limit}; send a shorter one"
            raise invalid(field, text, reason="VIDEO_TOO_LONG", limit=limit, requested=frames)
        size, limit = 3 * clip.width * clip.height * frames, self._config.max_video_bytes
        if size > limit:
            text = TEXTS["VIDEO_TOO_MUCH"].format(requested=size, limit=limit)
            raise invalid(field, text, reason="VIDEO_TOO_MUCH", limit=limit, requested=size)
