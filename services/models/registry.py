"""The families that Triptych serves: what differs between them, as data. Torch-free.

A family is named by the ``model_type`` of a checkpoint's config.json. To add one, add an entry here, an arithmetic
function where its token counts follow a new scheme, and a row in the equality tests.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.models import audio_lengths, image_sizes, tiling, video_plans
from services.models.audio_lengths import AudioScheme
from services.models.image_sizes import ImageScheme, each
from services.models.media import ALL_FRAMES, Look, Modality, Sampling
from services.models.video_plans import VideoScheme

# Layer types that a packed, paged step can run; anything else keeps state that would mix across sequences.
PROVEN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class Attention(enum.Enum):
    """Which tokens of a prompt see later ones.

    causal: none. image_spans: those of an image see all of it. prefix: the whole prompt sees itself.
    """

    CAUSAL = "causal"
    IMAGE_SPANS = "image_spans"
    PREFIX = "prefix"


class UnsupportedModel(ValueError):
    """A checkpoint that Triptych refuses; the text says why and what to do."""


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: as in config.json.
        architecture: class name in transformers.
        image: plans all pictures of a request; None: takes none.
        audio: plans a recording; None: takes none.
        video: plans a video; None: takes none.
        sampling: frames of a video that are looked at, where neither the caller nor the checkpoint says it.
        placeholders: config key that holds each modality's placeholder token.
        written: tokenizer_config key of what the chat template writes for an item, where that is not the placeholder.
        bos_after_images: BOS stands behind the last picture, of which there is one, and a line break ends the prompt.
        towers: submodules of the base model that only the encoder half keeps.
        decoder: submodule of the base model that is the language model; "" means the base model itself.
        language: submodules of the base model that only the language-model half keeps, where ``decoder`` is "".
        positions_from_grid: positions depend on each item's grid (M-RoPE).
        prunes_video: rows of a video can be dropped, because it is a single run whose positions come from its grid.
        attention: which tokens of a prompt see later ones.
        low: what its image processor is set to for a picture at low detail, which its schemes then heed; empty where they need
            not be told. None: detail is of no effect, because every picture costs the same.
        any_size: pictures and frames keep their shape and nearly their size, so that callers may bound their pixels.
        token_types: name of the argument that tells media tokens from text, where attention is not causal.
        cross: rows are read by cross-attention layers instead of standing in the prompt.
    """

    model_type: str
    architecture: str
    image: ImageScheme | None = None
    audio: AudioScheme | None = None
    video: VideoScheme | None = None
    sampling: Sampling = ALL_FRAMES
    placeholders: Mapping[Modality, str] = field(default_factory=dict)
    written: Mapping[Modality, str] = field(default_factory=dict)
    bos_after_images: bool = False
    towers: tuple[str, ...] = ()
    decoder: str = ""
    language: tuple[str, ...] = ()
    positions_from_grid: bool = False
    prunes_video: bool = False
    attention: Attention = Attention.CAUSAL
    low: Mapping[str, Any] | None = None
    any_size: bool = False
    token_types: str = "token_type_ids"
    cross: bool = False

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What it takes besides text."""
        return tuple(self.placeholders)

    def heeded(self, look: Look) -> Look:
        """What of ``look`` makes a difference."""
        limits = (look.min_pixels, look.max_pixels) if self.any_size else (None, None)
        return Look(look.low and self.low is not None, *limits)


_IMAGE, _VIDEO, _AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
_TWO_A_SECOND = Sampling(fps=2.0)
_VISION_TOWER = ("vision_tower", "multi_modal_projector")
_IDEFICS_TOWER = ("vision_model", "connector")
_QWEN_VISION = {_IMAGE: "image_token_id", _VIDEO: "video_token_id"}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            image=each(image_sizes.qwen_smart_resize),
            video=video_plans.qwen2_video,
            sampling=_TWO_A_SECOND,
            placeholders=_QWEN_VISION,
            towers=("visual",),
            low={},
            any_size=True,
            decoder="language_model",
            positions_from_grid=True,
            prunes_video=True,
        ),
        Family(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            image=each(image_sizes.qwen_smart_resize),
            video=video_plans.qwen2_5_video,
            sampling=_TWO_A_SECOND,
            placeholders=_QWEN_VISION,
            towers=("visual",),
            low={},
            any_size=True,
            decoder="language_model",
            positions_from_grid=True,
            prunes_video=True,
        ),
        Family(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            image=each(image_sizes.qwen_smart_resize),
            video=video_plans.qwen3_video,
            sampling=_TWO_A_SECOND,
            placeholders=_QWEN_VISION,
            towers=("visual",),
            low={},
            any_size=True,
            decoder="language_model",
            positions_from_grid=True,
        ),
        Family(
            "qwen2_5_omni_thinker",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            image=each(image_sizes.qwen_smart_resize),
            audio=audio_lengths.qwen2_audio_frames,
            video=video_plans.omni_video,
            sampling=_TWO_A_SECOND,
            placeholders={_IMAGE: "image_token_index", _VIDEO: "video_token_index", _AUDIO: "audio_token_index"},
            towers=("visual", "audio_tower"),
            low={},
            any_size=True,
            decoder="language_model",
            positions_from_grid=True,
            prunes_video=True,
        ),
        Family(
            "llava",
            "LlavaForConditionalGeneration",
            image=each(image_sizes.llava_fixed),
            placeholders={_IMAGE: "image_token_index"},
            towers=_VISION_TOWER,
            decoder="language_model",
        ),
        Family(
            "llava_next",
            "LlavaNextForConditionalGeneration",
            image=each(tiling.llava_next_anyres),
            placeholders={_IMAGE: "image_token_index"},
            towers=_VISION_TOWER,
            low={},
            decoder="language_model",
        ),
        Family(
            "llava_onevision",
            "LlavaOnevisionForConditionalGeneration",
            image=tiling.llava_onevision_anyres,
            video=video_plans.llava_onevision_video,
            sampling=Sampling(frames=32),
            placeholders={_IMAGE: "image_token_index", _VIDEO: "video_token_index"},
            towers=_VISION_TOWER,
            low={},
            decoder="language_model",
        ),
        Family(
            "internvl",
            "InternVLForConditionalGeneration",
            image=each(tiling.internvl_tiles),
            video=video_plans.internvl_video,
            sampling=Sampling(frames=8),
            placeholders={_IMAGE: "image_token_id", _VIDEO: "image_token_id"},
            written={_VIDEO: "video_token"},
            towers=_VISION_TOWER,
            low={"min_patches": 1, "max_patches": 1},
            decoder="language_model",
        ),
        Family(
            "smolvlm",
            "SmolVLMForConditionalGeneration",
            image=each(tiling.idefics3_tiles),
            placeholders={_IMAGE: "image_token_id"},
            towers=_IDEFICS_TOWER,
            low={"do_image_splitting": False},
            decoder="text_model",
        ),
        Family(
            "idefics3",
            "Idefics3ForConditionalGeneration",
            image=each(tiling.idefics3_tiles),
            placeholders={_IMAGE: "image_token_id"},
            towers=_IDEFICS_TOWER,
            low={"do_image_splitting": False},
            decoder="text_model",
        ),
        Family(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            image=each(tiling.gemma3_pan_and_scan),
            placeholders={_IMAGE: "image_token_index"},
            written={_IMAGE: "boi_token"},
            towers=_VISION_TOWER,
            low={"do_pan_and_scan": False},
            decoder="language_model",
            attention=Attention.IMAGE_SPANS,
        ),
        Family(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            image=each(image_sizes.gemma4_resize),
            placeholders={_IMAGE: "image_token_id"},
            towers=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
            low={"max_soft_tokens": 70},
            decoder="language_model",
            attention=Attention.IMAGE_SPANS,
            token_types="mm_token_type_ids",
        ),
        Family(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            image=each(image_sizes.paligemma_fixed),
            placeholders={_IMAGE: "image_token_index"},
            bos_after_images=True,
            towers=_VISION_TOWER,
            decoder="language_model",
            attention=Attention.PREFIX,
        ),
        Family(
            "mllama",
            "MllamaForConditionalGeneration",
            image=each(tiling.mllama_tiles),
            placeholders={_IMAGE: "image_token_index"},
            towers=("vision_model", "multi_modal_projector"),
            decoder="language_model",
            cross=True,
        ),
        Family(
            "qwen2_audio",
            "Qwen2AudioForConditionalGeneration",
            audio=audio_lengths.qwen2_audio_frames,
            placeholders={_AUDIO: "audio_token_index"},
            towers=("audio_tower", "multi_modal_projector"),
            decoder="language_model",
        ),
        Family(
            "voxtral",
            "VoxtralForConditionalGeneration",
            audio=audio_lengths.voxtral_windows,
            placeholders={_AUDIO: "audio_token_id"},
            towers=("audio_tower", "multi_modal_projector"),
            decoder="language_model",
        ),
        Family(
            "phi4_multimodal",
            "Phi4MultimodalForCausalLM",
            image=tiling.phi4_crops,
            placeholders={_IMAGE: "vision_config.image_token_id"},
            towers=("embed_tokens_extend",),
            low={"dynamic_hd": 1},
            language=("embed_tokens", "layers", "norm", "rotary_emb"),
        ),
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM"),
        Family("phi3", "Phi3ForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM"),
        Family("qwen3", "Qwen3ForCausalLM"),
        Family("gemma2", "Gemma2ForCausalLM"),
        Family("gemma3_text", "Gemma3ForCausalLM"),
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
    return FAMILIES[model_type]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    nested: Mapping[str, Any] = config.get("text_config") or config
    return nested
