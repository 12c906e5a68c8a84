"""What the gateway knows of the model it serves: a checkpoint's JSON files and tokenizer, never its weights."""

from __future__ import annotations

from functools import cached_property

import grpc

from services.common.errors import ServiceError
from services.gateway.config import GatewayConfig
from services.models.checkpoint import open_checkpoint
from services.models.layout import PromptLayout
from services.models.media import Modality
from services.models.registry import UnsupportedModel, text_config


class ServedModel:
    """The one model behind this gateway.

    Attributes:
        name: its name in requests.
        family: its transformers model_type.
        modalities: what it takes besides text; nothing where no encoder was given.
        max_model_len: most tokens of prompt and answer together.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.checkpoint = open_checkpoint(config.model)
        self.layout = PromptLayout(self.checkpoint)
        self.tokenizer = self.layout.tokenizer.fast
        self.name = config.served_model_name or self.checkpoint.name
        self.family = self.checkpoint.family.model_type
        self.modalities: tuple[Modality, ...] = self.checkpoint.family.modalities if config.encoder_addresses else ()
        if config.video_pruning_rate and not self.checkpoint.family.prunes_video:
            raise UnsupportedModel(
                f"--video-pruning-rate: rows can be dropped of videos that stand in one run with positions from a grid, as in "
                f"Qwen2-VL, Qwen2.5-VL and Qwen2.5-Omni; a {self.family} model cannot"
            )
        self.max_model_len = config.max_model_len or self.checkpoint.max_position_embeddings

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below this."""
        return int(text_config(self.checkpoint.config).get("vocab_size") or self.layout.tokenizer.vocab_size)

    def check_called(self, name: str) -> None:
        """Refuse another model's name.

        Raises:
            ServiceError: NOT_FOUND.
        """
        if name not in ("", "default", self.name):
            text = f"model: there is no model {name[:64]!r}; served is {self.name!r}, also called 'default'"
            served = {"served": self.name}
            raise ServiceError(grpc.StatusCode.NOT_FOUND, text, field="model", reason="MODEL_NOT_FOUND", metadata=served)
