"""Gemma 4 of the E kind: inputs of their own for every layer, late layers that share keys and values, two head sizes."""

from __future__ import annotations

from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids
from scripts.checkpoints.gemma import EOS, PAD, WINDOW, decoder, generation, layer_types
from scripts.checkpoints.tokenizers import gemma_tokenizer

END_TURN, VIDEO = "<turn|>", "<|video|>"
NAMES = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
TOKENS = ["<|think|>", "<|turn>", END_TURN, *NAMES.values(), VIDEO]
PATCH, POOLING = 16, 3
SIDE = 1024  # positions of a patch along one side; 840 is the most that 280 features allow, published tables have 10240


def gemma4(options: Options) -> Blueprint:
    """Gemma-4-E2B-it in small, without its audio tower: up to 280 features a picture, of whatever shape it has.

    Pictures attend to themselves both ways in sliding layers, as in the larger published models.

    Raises:
        ValueError: fewer than two layers, so none is of the sliding kind.
    """
    if options.layers < 2:
        raise ValueError(f"{options.layers} layers: gemma4 needs a sliding and a full one")
    tokenizer = gemma_tokenizer(
        options.vocab_size,
        TOKENS,
        model_max_length=8192,
        padding_side="left",
        extra_special_tokens=NAMES,
        chat_template=templates.GEMMA4,
    )
    token = dict(zip(NAMES, ids(tokenizer, *NAMES.values()), strict=True))
    shape = dict(decoder(options, tokenizer))
    config = Gemma4Config(
        text_config=dict(
            **shape,
            global_head_dim=2 * options.head_dim,
            sliding_window=WINDOW,
            layer_types=layer_types(options.layers),
            num_kv_shared_layers=min(options.layers // 2, options.layers - 2),
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=shape["vocab_size"],
            use_bidirectional_attention="vision",
            final_logit_softcapping=30.0,
        ),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            patch_size=PATCH,
            pooling_kernel_size=POOLING,
            position_embedding_size=SIDE,
        ),
        audio_config=None,
        image_token_id=token["image_token"],
        boi_token_id=token["boi_token"],
        eoi_token_id=token["eoi_token"],
        audio_token_id=token["audio_token"],
        boa_token_id=token["boa_token"],
        eoa_token_index=token["eoa_token"],
        video_token_id=ids(tokenizer, VIDEO)[0],
    )
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
        chat_template=templates.GEMMA4,
    )
    ends = generation(tokenizer, EOS, END_TURN)
    silent = (PAD, "<mask>", *NAMES.values(), VIDEO)
    return Blueprint(Gemma4ForConditionalGeneration, config, tokenizer, processor, ends, silent)
