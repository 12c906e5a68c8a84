"""Qwen families: ChatML, byte-level BPE, tied embeddings in the small models."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from scripts.checkpoints import templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import qwen2_tokenizer

END_OF_TEXT, IM_START, IM_END = CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION_TOKENS = [
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PATCH, MERGE, TEMPORAL = 14, 2, 2
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


def mrope_section(head_dim: int) -> list[int]:
    """Rotary pairs for time, height and width in the published ratio 2:3:3; they sum to half the head."""
    pairs = head_dim // 2
    time = pairs // 4
    height = (pairs - time) // 2
    return [time, height, pairs - time - height]


def qwen2(options: Options) -> Blueprint:
    """Qwen2-0.5B-Instruct in small."""
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        CHAT_TOKENS,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=32768,
        chat_template=templates.CHATML,
    )
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    config = Qwen2Config(
        **text_sizes(options, tokenizer),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=im_end,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    return Blueprint(Qwen2ForCausalLM, config, tokenizer, generation=generation)


def qwen2_vl(options: Options) -> Blueprint:
    """Qwen2-VL-2B-Instruct in small: the real patching and pixel limits, hence the real token counts."""
    special = CHAT_TOKENS + VISION_TOKENS
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        special,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=32768,
        chat_template=templates.QWEN2_VL,
    )
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    start, end, image, video = ids(tokenizer, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    rope = dict(rope_type="default", rope_theta=1_000_000.0, mrope_section=mrope_section(options.head_dim))
    config = Qwen2VLConfig(
        text_config=dict(
            **text_sizes(options, tokenizer),
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_parameters=rope,
            bos_token_id=end_of_text,
            eos_token_id=im_end,
            pad_token_id=end_of_text,
            tie_word_embeddings=True,
        ),
        vision_config=dict(
            depth=2,
            embed_dim=64,
            num_heads=4,
            mlp_ratio=4,
            hidden_size=options.hidden_size,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
        ),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    sizes: dict[str, Any] = dict(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=TEMPORAL, size=PIXELS)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=templates.QWEN2_VL,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    silent = ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    return Blueprint(Qwen2VLForConditionalGeneration, config, tokenizer, processor, generation, silent)
