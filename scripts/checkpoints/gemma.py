"""Gemma families: SentencePiece-like BPE, scaled tied embeddings, norms around every layer, sliding windows."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GemmaTokenizer,
)

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import gemma_tokenizer

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
START_TURN, END_TURN = TURNS = ["<start_of_turn>", "<end_of_turn>"]
START_IMAGE, END_IMAGE, IMAGE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
IMAGE_NAMES = {"boi_token": START_IMAGE, "eoi_token": END_IMAGE, "image_token": IMAGE}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 64  # published ones have 512 to 4096: here an ordinary prompt must outgrow it
SIGLIP_PATCH = 14


def layer_types(layers: int) -> list[str]:
    """Sliding and full layers in turn, a full one last."""
    return [FULL if (layers - index) % 2 else SLIDING for index in range(layers)]


def decoder(options: Options, tokenizer: GemmaTokenizer) -> dict[str, Any]:
    """The decoder fields common to all Gemmas."""
    pad, eos, bos = ids(tokenizer, PAD, EOS, BOS)
    return dict(
        **text_sizes(options, tokenizer),
        head_dim=options.head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=bos,
    )


def siglip(image_size: int, **more: Any) -> dict[str, Any]:
    """A narrow SigLIP tower without its pooling head."""
    return dict(
        model_type="siglip_vision_model",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=SIGLIP_PATCH,
        vision_use_head=False,
        **more,
    )


def generation(tokenizer: GemmaTokenizer, *ends: str) -> dict[str, Any]:
    """The generation config; any of ``ends`` stops an answer."""
    pad, bos = ids(tokenizer, PAD, BOS)
    return dict(pad_token_id=pad, bos_token_id=bos, eos_token_id=ids(tokenizer, *ends))


def gemma3(options: Options) -> Blueprint:
    """Gemma-3-4B-it in small: SigLIP at 896 px pooled to 256 features a picture, pan-and-scan off.

    Published window and layer pattern (1024 tokens, five sliding layers to one full) are shrunk to ``WINDOW`` and one to one.
    """
    special = [*TURNS, START_IMAGE, END_IMAGE, IMAGE]
    tokenizer = gemma_tokenizer(
        options.vocab_size,
        special,
        model_max_length=8192,
        padding_side="left",
        extra_special_tokens=IMAGE_NAMES,
        chat_template=templates.GEMMA3,
    )
    start, end, image = ids(tokenizer, START_IMAGE, END_IMAGE, IMAGE)
    config = Gemma3Config(
        text_config=dict(
            **decoder(options, tokenizer),
            query_pre_attn_scalar=options.head_dim,
            sliding_window=WINDOW,
            layer_types=layer_types(options.layers),
        ),
        vision_config=siglip(896),
        mm_tokens_per_image=256,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=image,
    )
    pan_and_scan = dict.fromkeys(
        (
            "do_pan_and_scan",
            "pan_and_scan_min_crop_size",
            "pan_and_scan_max_num_crops",
            "pan_and_scan_min_ratio_to_activate",
        )
    )
    half = [0.5, 0.5, 0.5]
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": 896, "width": 896}, image_mean=half, image_std=half, image_seq_length=256, **pan_and_scan
        ),
        tokenizer=tokenizer,
        chat_template=templates.GEMMA3,
        image_seq_length=256,
    )
    ends = generation(tokenizer, EOS, END_TURN)
    silent = (PAD, "<mask>", START_IMAGE, END_IMAGE, IMAGE)
    return Blueprint(Gemma3ForConditionalGeneration, config, tokenizer, processor, ends, silent)
