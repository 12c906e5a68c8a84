"""The families that Triptych serves: what differs between them, as data. Torch-free.

A family is named by the ``model_type`` of a checkpoint's config.json. To add one, add an entry here, an arithmetic
function where its token counts follow a new scheme, and a row in the equality tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.models import image_sizes
from services.models.media import ItemPlan, Modality

ImageScheme = Callable[[int, int, Mapping[str, Any], Mapping[str, Any]], ItemPlan]
# Layer types that a packed, paged step can run; anything else keeps state that would mix across sequences.
PROVEN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModel(ValueError):
    """A checkpoint that Triptych refuses; the text says why and what to do."""


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: as in config.json.
        architecture: class name in transformers.
        image: counts an image's tokens from (width, height, config, image processor settings); None: takes no images.
        placeholders: config key that holds each modality's placeholder token.
        towers: submodules of the base model that only the encoder half keeps.
        decoder: submodule of the base model that is the language model; "" means the base model itself.
        positions_from_grid: the merge needs each item's grid and the token types (M-RoPE).
    """

    model_type: str
    architecture: str
    image: ImageScheme | None = None
    placeholders: Mapping[Modality, str] = field(default_factory=dict)
    towers: tuple[str, ...] = ()
    decoder: str = ""
    positions_from_grid: bool = False

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What it takes besides text."""
        return tuple(self.placeholders)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            image=image_sizes.qwen_smart_resize,
            placeholders={Modality.IMAGE: "image_token_id"},
            towers=("visual",),
            decoder="language_model",
            positions_from_grid=True,
        ),
        Family(
            "llava",
            "LlavaForConditionalGeneration",
            image=image_sizes.llava_fixed,
            placeholders={Modality.IMAGE: "image_token_index"},
            towers=("vision_tower", "multi_modal_projector"),
            decoder="language_model",
        ),
        Family("llama", "LlamaForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM"),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint.

    Raises:
        UnsupportedModel: the family is unknown, or its decoder cannot run packed.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    text = text_config(config)
    odd = sorted(set(text.get("layer_types") or ()) - PROVEN_LAYER_TYPES)
    if odd:
        raise UnsupportedModel(
            f"{model_type} with layers of type {', '.join(odd)} is not supported: their state would mix across the sequences of "
            "a batch; use a checkpoint whose layers are full or sliding attention"
        )
    if (text.get("rope_parameters") or text.get("rope_scaling") or {}).get("rope_type") in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"{model_type} with dynamic or longrope RoPE is not supported yet: one long request would change the "
            "positions of others"
        )
    return FAMILIES[model_type]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    nested: Mapping[str, Any] = config.get("text_config") or config
    return nested
