"""Llama 3.2 Vision: a Llama decoder whose cross-attention layers look at the picture's tiles."""

from __future__ import annotations

from transformers import MllamaConfig, MllamaForConditionalGeneration, MllamaImageProcessor, MllamaProcessor

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import ROWS, Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import llama3_tokenizer

BEGIN, END, PAD, TURN, IMAGE = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eot_id|>", "<|image|>"
TOKENS = [
    BEGIN,
    END,
    *(f"<|reserved_special_token_{index}|>" for index in range(2)),
    PAD,
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    TURN,
    "<|python_tag|>",
    IMAGE,  # past the head's last row: the model reads it and cannot say it
]
TILE, PATCH, TILES = 112, 14, 4  # published: 560 px, hence 1601 states a tile instead of 65
INTERMEDIATE = [0, 1]


def mllama(options: Options) -> Blueprint:
    """Llama-3.2-11B-Vision-Instruct in small: up to four tiles a picture, cross-attention in every second layer.

    The head has as many rows as tokens before ``<|image|>``; the embedding has eight more.

    Raises:
        ValueError: fewer than two layers, so none looks at pictures.
    """
    if options.layers < 2:
        raise ValueError(f"{options.layers} layers: mllama needs one of each kind")
    head = -(-options.vocab_size // ROWS) * ROWS
    tokenizer = llama3_tokenizer(
        head + 1,
        TOKENS,
        BEGIN,
        eos_token=TURN,
        pad_token=PAD,
        padding_side="left",
        model_max_length=8192,
        chat_template=templates.MLLAMA,
    )
    begin, end, pad, message_end, turn, image = ids(tokenizer, BEGIN, END, PAD, "<|eom_id|>", TURN, IMAGE)
    config = MllamaConfig(
        text_config=dict(
            **text_sizes(options, tokenizer) | {"vocab_size": image},
            cross_attention_layers=list(range(1, options.layers, 2)),
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
            tie_word_embeddings=False,
            bos_token_id=begin,
            eos_token_id=[end, message_end, turn],
            pad_token_id=pad,
        ),
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_global_layers=2,
            attention_heads=4,
            image_size=TILE,
            patch_size=PATCH,
            max_num_tiles=TILES,
            intermediate_layers_indices=INTERMEDIATE,
            vision_output_dim=64 * (1 + len(INTERMEDIATE)),
        ),
        image_token_index=image,
    )
    processor = MllamaProcessor(
        image_processor=MllamaImageProcessor(
            size={"height": TILE, "width": TILE},
            max_image_tiles=TILES,
            image_mean=[0.48145466, 0.4578275, 0.40821073],
            image_std=[0.26862954, 0.26130258, 0.27577711],
        ),
        tokenizer=tokenizer,
        chat_template=templates.MLLAMA,
    )
    generation = dict(bos_token_id=begin, pad_token_id=pad, eos_token_id=[end, message_end, turn])
    silent = (PAD, *(token for token in TOKENS if "reserved" in token))
    return Blueprint(MllamaForConditionalGeneration, config, tokenizer, processor, generation, silent)
