"""What a request takes of everything that requests share. Knows no budgets and no queue."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum

from services.models.media import Modality

LONG_TEXT_TOKENS = 2048


class Class(IntEnum):
    """Kinds of requests by what they cost, cheapest first; the queue tells them apart."""

    SHORT_TEXT = 0
    LONG_TEXT = 1
    IMAGE = 2
    RECORDING = 3  # audio and video

    @property
    def word(self) -> str:
        """Its name in metrics and logs."""
        return self.name.lower()


@dataclass(frozen=True)
class Cost:
    """A request's cost vector, known before anything of it is decoded.

    Attributes:
        prompt_tokens: length of the prompt; it stays in KV blocks until the end.
        answer_tokens: most tokens of one answer.
        answers: how many are asked for; they share the prompt's full blocks.
        cached_tokens: prompt tokens that should lie in the prefix cache of a language model, by its address.
        encoder_patches: patches that go through the encoder's towers, without what it has already.
        encoder_items: media items handed to the encoder.
        media_bytes: bytes of their files, held here from arrival to the end.
    """

    prompt_tokens: int
    answer_tokens: int
    answers: int = 1
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    encoder_patches: int = 0
    encoder_items: int = 0
    media_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of prompt and longest answers."""
        return self.prompt_tokens + self.answers * self.answer_tokens

    @property
    def price(self) -> int:
        """One figure for fairness between tenants: tokens and patches, each about one column of some matrix product."""
        return self.tokens + self.encoder_patches

    def prefill_tokens(self, llm: str) -> int:
        """Prompt tokens that a language model has to compute; at least the last one always is."""
        return max(1, self.prompt_tokens - self.cached_tokens.get(llm, 0))

    def blocks(self, block_size: int) -> int:
        """KV blocks for the whole life: full ones of the prompt once, and for each answer its own from there on."""
        shared, rest = divmod(self.prompt_tokens, block_size)
        return shared + self.answers * -(-(rest + self.answer_tokens) // block_size)


def kind_of(prompt_tokens: int, modalities: AbstractSet[Modality]) -> Class:
    """The class of a prompt."""
    if modalities & {Modality.AUDIO, Modality.VIDEO}:
        return Class.RECORDING
    if modalities:
        return Class.IMAGE
    return Class.LONG_TEXT if prompt_tokens > LONG_TEXT_TOKENS else Class.SHORT_TEXT
