"""Families around a Llama decoder."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPImageProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from scripts.checkpoints import templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import llama2_tokenizer, llama3_tokenizer

LLAMA3_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
]
DYNAMIC_LENGTH = 64
IMAGE, PAD = "<image>", "<pad>"
CLIP_IMAGE, CLIP_PATCH = 336, 14
CLIP_CROP = {"height": CLIP_IMAGE, "width": CLIP_IMAGE}


def llama(options: Options) -> Blueprint:
    """Llama-3-8B-Instruct in small: grouped heads, untied embeddings and, as published, no padding token."""
    return llama3(options, 8192, rope_type="default")


def llama_dynamic(options: Options) -> Blueprint:
    """The same with NTK-aware rotary frequencies, which change with every token past ``DYNAMIC_LENGTH``."""
    return llama3(options, DYNAMIC_LENGTH, rope_type="dynamic", factor=4.0)


def llama3(options: Options, positions: int, **rope: Any) -> Blueprint:
    """Llama 3 trained for ``positions`` tokens; ``rope`` completes the rotary parameters."""
    tokenizer = llama3_tokenizer(
        options.vocab_size,
        LLAMA3_TOKENS,
        "<|begin_of_text|>",
        eos_token="<|eot_id|>",
        model_max_length=8192,
        chat_template=templates.LLAMA3,
    )
    begin, end, turn = ids(tokenizer, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    config = LlamaConfig(
        **text_sizes(options, tokenizer),
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_theta=500_000.0, **rope),
        tie_word_embeddings=False,
        bos_token_id=begin,
        eos_token_id=turn,
    )
    reserved = tuple(token for token in LLAMA3_TOKENS if "reserved" in token)
    generation = dict(bos_token_id=begin, eos_token_id=[end, turn])
    return Blueprint(LlamaForCausalLM, config, tokenizer, generation=generation, silent=reserved)


def llava(options: Options) -> Blueprint:
    """LLaVA-1.5-7B in small: CLIP at 336 px, 576 features per picture.

    The features are those of the last layer but one, without the class token.
    """
    tokenizer = llama2_tokenizer(
        options.vocab_size,
        [IMAGE, PAD],
        pad_token=PAD,
        padding_side="left",
        model_max_length=4096,
        extra_special_tokens={"image_token": IMAGE},
        chat_template=templates.LLAVA,
    )
    bos, eos, pad, image = ids(tokenizer, "<s>", "</s>", PAD, IMAGE)
    config = LlavaConfig(
        text_config=dict(
            model_type="llama",
            **text_sizes(options, tokenizer, grouped=False),
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
        ),
        vision_config=dict(
            model_type="clip_vision_model",
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=CLIP_IMAGE,
            patch_size=CLIP_PATCH,
            projection_dim=64,
        ),
        image_token_index=image,
        image_seq_length=(CLIP_IMAGE // CLIP_PATCH) ** 2,
        projector_hidden_act="gelu",
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": CLIP_IMAGE}, crop_size=CLIP_CROP),
        tokenizer=tokenizer,
        patch_size=CLIP_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=templates.LLAVA,
    )
    generation = dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return Blueprint(LlavaForConditionalGeneration, config, tokenizer, processor, generation, (IMAGE, PAD))
