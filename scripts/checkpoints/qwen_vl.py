"""Qwen2.5-VL and Qwen3-VL: the published patching and pixel limits, hence the published token counts."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from scripts.checkpoints import templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.qwen import CHAT_TOKENS, END_OF_TEXT, IM_END, MERGE, TEMPORAL, VISION_TOKENS, mrope_section
from scripts.checkpoints.tokenizers import qwen2_tokenizer

SILENT = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
PIXELS_2_5 = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
PIXELS_3 = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
VIDEO_PIXELS_3 = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 24576}  # of all frames together
HALF = [0.5, 0.5, 0.5]
DEEPSTACK = [0, 1, 2]


def vl_tokenizer(options: Options, template: str) -> Qwen2Tokenizer:
    """The tokenizer of every Qwen vision model."""
    return qwen2_tokenizer(
        options.vocab_size,
        CHAT_TOKENS + VISION_TOKENS,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=131072,
        chat_template=template,
    )


def vl_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """The config's fields that name tokens."""
    fields = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(fields, ids(tokenizer, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"), strict=True))


def text(options: Options, tokenizer: Qwen2Tokenizer, **own: Any) -> dict[str, Any]:
    """The decoder of a small model: tied embeddings."""
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    return dict(
        **text_sizes(options, tokenizer),
        rms_norm_eps=1e-6,
        bos_token_id=end_of_text,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        tie_word_embeddings=True,
        **own,
    )


def generation(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    return dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])


def qwen2_5_vl(options: Options) -> Blueprint:
    """Qwen2.5-VL-3B-Instruct in small: its first vision layer attends within windows, its last to all patches."""
    tokenizer = vl_tokenizer(options, templates.QWEN2_VL)
    rope = dict(rope_type="default", rope_theta=1_000_000.0, mrope_section=mrope_section(options.head_dim))
    config = Qwen2_5_VLConfig(
        text_config=text(options, tokenizer, max_position_embeddings=128000, rope_parameters=rope),
        vision_config=dict(
            depth=2,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            out_hidden_size=options.hidden_size,
            patch_size=14,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
            tokens_per_second=2,
            window_size=112,
            fullatt_block_indexes=[1],
        ),
        **vl_ids(tokenizer),
        tie_word_embeddings=True,
    )
    sizes: dict[str, Any] = dict(patch_size=14, merge_size=MERGE, temporal_patch_size=TEMPORAL, size=PIXELS_2_5)
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=templates.QWEN2_VL,
    )
    return Blueprint(Qwen2_5_VLForConditionalGeneration, config, tokenizer, processor, generation(tokenizer), SILENT)


def interleaved_section(head_dim: int) -> list[int]:
    """Rotary pairs for time, height and width in the published ratio 24:20:20; they sum to half the head."""
    pairs = head_dim // 2
    side = pairs * 20 // 64
    return [pairs - 2 * side, side, side]


def qwen3_vl(options: Options) -> Blueprint:
    """Qwen3-VL-2B-Instruct in small: patches of 16, three deepstack levels, a time stamp before each pair of frames."""
    tokenizer = vl_tokenizer(options, templates.QWEN3_VL)
    rope = dict(
        rope_type="default",
        rope_theta=5_000_000.0,
        mrope_section=interleaved_section(options.head_dim),
        mrope_interleaved=True,
    )
    own = dict(head_dim=options.head_dim, max_position_embeddings=262144, rope_parameters=rope)
    config = Qwen3VLConfig(
        text_config=text(options, tokenizer, **own),
        vision_config=dict(
            depth=len(DEEPSTACK) + 1,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            out_hidden_size=options.hidden_size,
            patch_size=16,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
            num_position_embeddings=2304,
            deepstack_visual_indexes=DEEPSTACK,
        ),
        **vl_ids(tokenizer),
        tie_word_embeddings=True,
    )
    sizes: dict[str, Any] = dict(patch_size=16, merge_size=MERGE, temporal_patch_size=TEMPORAL, image_mean=HALF, image_std=HALF)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, size=PIXELS_3),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**sizes, size=VIDEO_PIXELS_3),
        chat_template=templates.QWEN3_VL,
    )
    return Blueprint(Qwen3VLForConditionalGeneration, config, tokenizer, processor, generation(tokenizer), SILENT)
