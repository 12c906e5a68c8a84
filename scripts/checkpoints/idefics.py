"""Idefics3 and SmolVLM: every tile of a picture stands between text tokens that name its row and column."""

from __future__ import annotations

from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import llama3_tokenizer

AROUND, IMAGE, GLOBAL, END_TURN = "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IMAGE_TOKENS = [GLOBAL, *PLACES, AROUND, IMAGE, END_TURN]


def tower(image_size: int, patch_size: int) -> dict[str, Any]:
    """A narrow SigLIP tower that takes pictures of any shape within its square."""
    return dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=patch_size,
    )


def smolvlm(options: Options) -> Blueprint:
    """SmolVLM-256M-Instruct in small: tiles of 512 px, 64 features each, at most three by three and the view of the whole.

    Published are four by four. Its processor needs the package num2words.
    """
    start, end, pad, video = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<video>"
    tokenizer = llama3_tokenizer(
        options.vocab_size,
        [pad, start, end, *IMAGE_TOKENS, video],
        None,
        bos_token=start,
        eos_token=END_TURN,
        pad_token=pad,
        padding_side="left",
        model_max_length=8192,
        extra_special_tokens={
            "fake_image_token": AROUND,
            "image_token": IMAGE,
            "global_image_token": GLOBAL,
            "end_of_utterance_token": END_TURN,
            "video_token": video,
        },
        chat_template=templates.smolvlm(start),
    )
    bos, turn, padding, image = ids(tokenizer, start, END_TURN, pad, IMAGE)
    config = SmolVLMConfig(
        text_config=dict(
            model_type="llama",
            **text_sizes(options, tokenizer),
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=100_000.0),
            bos_token_id=bos,
            eos_token_id=turn,
            pad_token_id=padding,
        ),
        vision_config=tower(512, 16),
        image_token_id=image,
        scale_factor=4,
        tie_word_embeddings=False,
    )
    sizes: dict[str, Any] = dict(size={"longest_edge": 3 * 512}, max_image_size={"longest_edge": 512})
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(**sizes | {"size": {"longest_edge": 512}}),
        image_seq_len=64,
        chat_template=templates.smolvlm(start),
    )
    generation = dict(bos_token_id=bos, eos_token_id=turn, pad_token_id=padding)
    silent = (pad, video, IMAGE)
    return Blueprint(SmolVLMForConditionalGeneration, config, tokenizer, processor, generation, silent)


def idefics3(options: Options) -> Blueprint:
    """Idefics3-8B-Llama3 in small: tiles of 364 px, 169 features each, at most two by two and the view of the whole.

    Published are four by four.
    """
    begin, end, pad = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"
    tokenizer = llama3_tokenizer(
        options.vocab_size,
        [begin, end, pad, *IMAGE_TOKENS],
        begin,
        eos_token=END_TURN,
        pad_token=pad,
        padding_side="left",
        model_max_length=8192,
        chat_template=templates.smolvlm(begin),
    )
    bos, eos, turn, padding, image = ids(tokenizer, begin, end, END_TURN, pad, IMAGE)
    config = Idefics3Config(
        text_config=dict(
            model_type="llama",
            **text_sizes(options, tokenizer),
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
            bos_token_id=bos,
            eos_token_id=[eos, turn],
            pad_token_id=padding,
        ),
        vision_config=tower(364, 14),
        image_token_id=image,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(size={"longest_edge": 2 * 364}, max_image_size={"longest_edge": 364}),
        tokenizer=tokenizer,
        image_seq_len=169,
        chat_template=templates.smolvlm(begin),
    )
    generation = dict(bos_token_id=bos, eos_token_id=[eos, turn], pad_token_id=padding)
    silent = (pad, IMAGE)
    return Blueprint(Idefics3ForConditionalGeneration, config, tokenizer, processor, generation, silent)
