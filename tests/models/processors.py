"""Stock processors run on blank pictures, beside the checkpoint that plans for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.hf import transformers
from services.models.layout import PromptLayout
from services.models.media import ItemPlan, Modality

Size = tuple[int, int]  # width, height
FAMILIES = [  # whose processor runs on tensors without memory: all but Phi-4's
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker", "llava", "llava_next", "llava_onevision", "internvl"),
    *("smolvlm", "idefics3", "gemma3", "gemma4", "paligemma", "mllama"),
]


def load(path: Path) -> tuple[Checkpoint, Any]:
    checkpoint = open_checkpoint(str(path))
    if checkpoint.family.model_type == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    return checkpoint, transformers.AutoProcessor.from_pretrained(path)


def prepare(processor: Any, pictures: list[Size], device: str = "meta", **settings: Any) -> tuple[Any, list[str]]:
    """What the processor makes of the pictures of one request, and what it writes for each.

    It really runs, on tensors without memory: only shapes are computed, so that a huge picture costs no more than a small one.
    """
    blank = [torch.zeros((3, height, width), dtype=torch.uint8, device=device) for width, height in pictures]
    chosen = processor._merge_kwargs()["images_kwargs"] | {"input_data_format": "channels_first"} | settings
    inputs = processor.image_processor([blank], **chosen)
    if type(processor).__name__ == "LlavaProcessor":  # it copies pixels to ask for their shape
        inputs["pixel_values"] = [torch.empty(pixels.shape) for pixels in inputs["pixel_values"]]
    return inputs, [processor.replace_image_token(inputs, i, **chosen) for i in range(len(pictures))]


def spelled(checkpoint: Checkpoint, plan: ItemPlan) -> str:
    """What stands in the prompt in place of the item."""
    token = PromptLayout(checkpoint).tokenizer.fast.id_to_token(checkpoint.placeholder_id(plan.modality))
    return "".join(part if isinstance(part, str) else token * part for part in plan.spelling)


def with_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> Checkpoint:
    images = {**checkpoint.settings[Modality.IMAGE], **settings}
    return dataclasses.replace(checkpoint, settings={**checkpoint.settings, Modality.IMAGE: images})
