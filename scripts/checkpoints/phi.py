"""Phi-4 multimodal: towers inside the decoder's own embedding, fused projections, two ranges of rotary factors."""

from __future__ import annotations

from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalProcessor,
)

from scripts.checkpoints import templates_vision as templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.tokenizers import llama3_tokenizer

END_OF_TEXT, END_TURN, IMAGE, AUDIO = "<|endoftext|>", "<|end|>", "<|image|>", "<|audio|>"
TOKENS = [END_OF_TEXT, IMAGE, AUDIO, "<|assistant|>", END_TURN, "<|user|>", "<|system|>"]
CROP, PATCH, CROPS = 448, 14, 4  # published: up to 36 crops
ROTARY = 0.75  # of a head's channels


def phi4_multimodal(options: Options) -> Blueprint:
    """Phi-4-multimodal-instruct in small: crops of 448 px, up to four a picture and the view of the whole.

    Adapters are no part of this class; the published ones lie beside the weights in folders of their own.
    """
    tokenizer = llama3_tokenizer(
        options.vocab_size,
        TOKENS,
        None,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=131072,
        extra_special_tokens={"image_token": IMAGE, "audio_token": AUDIO},
        chat_template=templates.PHI4,
    )
    end_of_text, turn, image, audio = ids(tokenizer, END_OF_TEXT, END_TURN, IMAGE, AUDIO)
    pairs = int(options.head_dim * ROTARY) // 2
    config = Phi4MultimodalConfig(
        **text_sizes(options, tokenizer),
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10_000.0,
            partial_rotary_factor=ROTARY,
            short_factor=[1.0] * pairs,
            long_factor=[1.0 + pair for pair in range(pairs)],
        ),
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, turn],
        pad_token_id=end_of_text,
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=CROP,
            crop_size=CROP,
            patch_size=PATCH,
            image_token_id=image,
        ),
        audio_config=dict(
            hidden_size=32,
            intermediate_size=48,
            num_blocks=1,
            num_attention_heads=4,
            ext_pw_out_channel=32,
            depthwise_separable_out_channel=32,
            nemo_conv_channels=32,
            audio_token_id=audio,
        ),
    )
    processor = Phi4MultimodalProcessor(
        Phi4MultimodalImageProcessor(dynamic_hd=CROPS),
        Phi4MultimodalFeatureExtractor(),
        tokenizer,
        chat_template=templates.PHI4,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[turn, end_of_text])
    silent = (IMAGE, AUDIO)
    return Blueprint(Phi4MultimodalForCausalLM, config, tokenizer, processor, generation, silent)
