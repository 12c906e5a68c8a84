"""What a family's builder is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

ROWS = 64  # embeddings are padded to a multiple of this, as published ones are


@dataclass(frozen=True)
class Options:
    """The sizes a caller may choose; everything else is the family's own."""

    hidden_size: int = 64
    layers: int = 4
    vocab_size: int = 1000

    def __post_init__(self) -> None:
        if self.hidden_size < 32 or self.hidden_size % 32:
            raise ValueError(f"hidden size {self.hidden_size} is not a positive multiple of 32")
        if self.layers < 1:
            raise ValueError(f"{self.layers} layers: at least one is needed")

    @property
    def heads(self) -> int:
        """Attention heads: four, or one per 64 channels in wider models."""
        return max(4, self.hidden_size // 64) if self.hidden_size % 64 == 0 else 4

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    def rows(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Rows of the embedding: all tokens and no fewer than asked for, padded to a multiple of ``ROWS``."""
        return -(-max(len(tokenizer), self.vocab_size) // ROWS) * ROWS


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint before its weights: everything that ``writer.write`` needs."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()  # tokens that greedy decoding must never answer: placeholders, reserved, padding


Builder = Callable[[Options], Blueprint]


def ids(tokenizer: PreTrainedTokenizerBase, *tokens: str) -> list[int]:
    """Ids of tokens that must exist."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def text_sizes(options: Options, tokenizer: PreTrainedTokenizerBase, *, grouped: bool = True) -> dict[str, Any]:
    """The decoder fields common to Llama-like configs; ``grouped`` halves the key-value heads."""
    return dict(
        vocab_size=options.rows(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 2 if grouped else options.heads,
    )
