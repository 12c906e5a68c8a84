"""Gemma families: SentencePiece-like BPE, scaled tied embeddings, norms around every layer, sliding windows."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma3TextConfig,
    GemmaTokenizer,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
)
from transformers.models.paligemma.processing_paligemma import EXTRA_TOKENS as PLACES

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import gemma_tokenizer

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
START_TURN, END_TURN = TURNS = ["<start_of_turn>", "<end_of_turn>"]
START_IMAGE, END_IMAGE, IMAGE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
IMAGE_WORD = "<image>"
IMAGE_NAMES = {"boi_token": START_IMAGE, "eoi_token": END_IMAGE, "image_token": IMAGE}
SLIDING, FULL = "sliding_attention", "full_attention"
HALF = [0.5, 0.5, 0.5]  # mean and deviation of SigLIP's pixels
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
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(
            size={"height": 896, "width": 896}, image_mean=HALF, image_std=HALF, image_seq_length=256, **pan_and_scan
        ),
        tokenizer=tokenizer,
        chat_template=templates.GEMMA3,
        image_seq_length=256,
    )
    ends = generation(tokenizer, EOS, END_TURN)
    silent = (PAD, "<mask>", START_IMAGE, END_IMAGE, IMAGE)
    return Blueprint(Gemma3ForConditionalGeneration, config, tokenizer, processor, ends, silent)


def gemma3_text(options: Options) -> Blueprint:
    """Gemma-3-1B-it in small; window and pattern as in ``gemma3``."""
    tokenizer = gemma_tokenizer(options.vocab_size, TURNS, model_max_length=8192, chat_template=templates.GEMMA3)
    config = Gemma3TextConfig(
        **decoder(options, tokenizer),
        query_pre_attn_scalar=options.head_dim,
        sliding_window=WINDOW,
        layer_types=layer_types(options.layers),
    )
    ends = generation(tokenizer, EOS, END_TURN)
    return Blueprint(Gemma3ForCausalLM, config, tokenizer, generation=ends, silent=(PAD, "<mask>"))


def gemma2(options: Options) -> Blueprint:
    """Gemma-2-2B-it in small: soft caps on attention scores and logits, sliding and full layers in turn."""
    tokenizer = gemma_tokenizer(options.vocab_size, TURNS, model_max_length=8192, chat_template=templates.GEMMA2)
    config = Gemma2Config(**decoder(options, tokenizer), **gemma2_attention(options))
    ends = generation(tokenizer, EOS, END_TURN)
    return Blueprint(Gemma2ForCausalLM, config, tokenizer, generation=ends, silent=(PAD, "<mask>"))


def gemma2_attention(options: Options) -> dict[str, Any]:
    return dict(
        query_pre_attn_scalar=options.head_dim,
        sliding_window=WINDOW,
        layer_types=layer_types(options.layers),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )


def paligemma(options: Options) -> Blueprint:
    """PaliGemma-2-3B-mix-224 in small: 256 features a picture, pictures before the text, one turn, never text alone.

    The processor adds 1152 tokens for places in the picture, past the vocabulary size asked for.
    """
    tokenizer = gemma_tokenizer(
        options.vocab_size,
        [IMAGE_WORD],
        model_max_length=8192,
        extra_special_tokens={"image_token": IMAGE_WORD},
        chat_template=templates.PALIGEMMA,
    )
    processor = PaliGemmaProcessor(
        image_processor=SiglipImageProcessor(
            size={"height": 224, "width": 224}, image_mean=HALF, image_std=HALF, image_seq_length=256
        ),
        tokenizer=tokenizer,
        chat_template=templates.PALIGEMMA,
    )
    config = PaliGemmaConfig(
        text_config=dict(model_type="gemma2", **decoder(options, tokenizer), **gemma2_attention(options)),
        vision_config=siglip(224),
        image_token_index=ids(tokenizer, IMAGE_WORD)[0],
        projection_dim=options.hidden_size,
        hidden_size=options.hidden_size,
    )
    ends = generation(tokenizer, EOS)
    silent = (PAD, "<mask>", IMAGE_WORD, *PLACES)
    return Blueprint(PaliGemmaForConditionalGeneration, config, tokenizer, processor, ends, silent)
