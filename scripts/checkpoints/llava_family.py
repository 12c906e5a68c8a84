"""LLaVA's descendants: pictures cut into a grid of tiles beside a small view of the whole, and InternVL."""

from __future__ import annotations

from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.gemma import HALF, siglip
from scripts.checkpoints.qwen import CHAT_TOKENS, END_OF_TEXT, IM_END
from scripts.checkpoints.tokenizers import llama2_tokenizer, qwen2_tokenizer

IMAGE, VIDEO, PAD = "<image>", "<video>", "<pad>"
PATCH = 14
NEXT_TILE = 112  # a third of the published side: 64 features a tile instead of 576
NEXT_GRID = [[rows * NEXT_TILE, columns * NEXT_TILE] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
ONE_TILE = 128  # a third of the published side, like it no multiple of the patch: 81 features a tile instead of 729
ONE_GRID = [[rows * ONE_TILE, columns * ONE_TILE] for rows in range(1, 7) for columns in range(1, 7)]
INTERN_TILE, INTERN_TILES = 448, 6  # published: up to 12 tiles and the view of the whole
INTERN_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": VIDEO,
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def llava_next(options: Options) -> Blueprint:
    """LLaVA-1.6-Mistral-7B in small: CLIP tiles on the published grids at a third of their size, a newline after each row."""
    tokenizer = llama2_tokenizer(
        options.vocab_size,
        [IMAGE, PAD],
        pad_token=PAD,
        padding_side="left",
        model_max_length=8192,
        extra_special_tokens={"image_token": IMAGE},
        chat_template=templates.LLAVA_NEXT,
    )
    bos, eos, pad, image = ids(tokenizer, "<s>", "</s>", PAD, IMAGE)
    config = LlavaNextConfig(
        text_config=dict(
            model_type="mistral",
            **text_sizes(options, tokenizer),
            head_dim=options.head_dim,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
            sliding_window=None,
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
            image_size=NEXT_TILE,
            patch_size=PATCH,
            projection_dim=64,
        ),
        image_token_index=image,
        image_seq_length=(NEXT_TILE // PATCH) ** 2,
        image_grid_pinpoints=NEXT_GRID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": NEXT_TILE},
            crop_size={"height": NEXT_TILE, "width": NEXT_TILE},
            image_grid_pinpoints=NEXT_GRID,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=templates.LLAVA_NEXT,
    )
    generation = dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return Blueprint(LlavaNextForConditionalGeneration, config, tokenizer, processor, generation, (IMAGE, PAD))


def qwen2_decoder(options: Options, tokenizer: Any) -> dict[str, Any]:
    """A Qwen2 decoder with tied embeddings."""
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    return dict(
        model_type="qwen2",
        **text_sizes(options, tokenizer),
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
    )


def llava_onevision(options: Options) -> Blueprint:
    """LLaVA-OneVision-Qwen2-0.5B-ov in small: SigLIP tiles on grids up to six by six, shrunk to nine tiles' worth.

    One picture is cut into tiles; of several, each is a single one. Tiles have a third of the published side.
    """
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        [*CHAT_TOKENS, IMAGE, VIDEO],
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=32768,
        chat_template=templates.LLAVA_ONEVISION,
    )
    image, video, end_of_text, im_end = ids(tokenizer, IMAGE, VIDEO, END_OF_TEXT, IM_END)
    config = LlavaOnevisionConfig(
        text_config=qwen2_decoder(options, tokenizer),
        vision_config=siglip(ONE_TILE),
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=ONE_GRID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=True,
    )
    pixels: dict[str, Any] = dict(size={"height": ONE_TILE, "width": ONE_TILE}, image_mean=HALF, image_std=HALF)
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=ONE_GRID, **pixels),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(**pixels),
        num_image_tokens=(ONE_TILE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=templates.LLAVA_ONEVISION,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    return Blueprint(LlavaOnevisionForConditionalGeneration, config, tokenizer, processor, generation, (IMAGE, VIDEO))


def internvl(options: Options) -> Blueprint:
    """InternVL3-1B in small: tiles of 448 px, 256 features each, at most six of them and the view of the whole."""
    special = [*CHAT_TOKENS, *INTERN_TOKENS.values()]
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        special,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=32768,
        extra_special_tokens=INTERN_TOKENS,
        chat_template=templates.INTERNVL,
    )
    context, end_of_text, im_end = ids(tokenizer, INTERN_TOKENS["context_image_token"], END_OF_TEXT, IM_END)
    config = InternVLConfig(
        text_config=qwen2_decoder(options, tokenizer),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            attention_bias=True,
            image_size=[INTERN_TILE, INTERN_TILE],
            patch_size=[PATCH, PATCH],
        ),
        image_token_id=context,
        image_seq_length=256,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    pixels: dict[str, Any] = dict(size={"height": INTERN_TILE, "width": INTERN_TILE}, **IMAGENET)
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(crop_to_patches=True, min_patches=1, max_patches=INTERN_TILES, **pixels),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(**pixels),
        image_seq_length=256,
        chat_template=templates.INTERNVL,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    silent = tuple(INTERN_TOKENS.values())
    return Blueprint(InternVLForConditionalGeneration, config, tokenizer, processor, generation, silent)
