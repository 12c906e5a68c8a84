"""Families that listen: small Whisper-like towers behind the published mel settings, windows and token rates."""

from __future__ import annotations

from typing import Any

from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from scripts.checkpoints import templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.qwen import CHAT_TOKENS, END_OF_TEXT, IM_END, MERGE, PATCH, TEMPORAL, mrope_section
from scripts.checkpoints.qwen_vl import PIXELS_2_5
from scripts.checkpoints.tokenizers import qwen2_tokenizer, tekken_tokenizer

MEL: dict[str, Any] = dict(feature_size=128, sampling_rate=16000, hop_length=160, n_fft=400)
WIDTH = 64
TOWER: dict[str, Any] = dict(num_mel_bins=128, max_source_positions=1500)

AUDIO, AUDIO_BOS, AUDIO_EOS = AUDIO_TOKENS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
OMNI_NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": AUDIO,
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": AUDIO_BOS,
    "audio_eos_token": AUDIO_EOS,
}
OMNI_TOKENS = [
    *AUDIO_TOKENS,
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
]

# In this order they have the published ids, 0 to 35; VoxtralProcessor relies on [AUDIO] being 24.
VOXTRAL_TOKENS = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"<SPECIAL_{index}>" for index in range(20, 24)),
    *("[AUDIO]", "[BEGIN_AUDIO]"),
    *(f"<SPECIAL_{index}>" for index in range(26, 34)),
    *("[TRANSCRIBE]", "<SPECIAL_35>"),
]


def whisper_tower(**own: Any) -> dict[str, Any]:
    """A Qwen audio tower: two layers, published windows."""
    sizes = dict(d_model=WIDTH, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128)
    return TOWER | sizes | own


def qwen2_audio(options: Options) -> Blueprint:
    """Qwen2-Audio-7B-Instruct in small: one window of 30 s a recording (the rest is cut off), 25 features a second."""
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        CHAT_TOKENS + AUDIO_TOKENS,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=8192,
        chat_template=templates.QWEN2_AUDIO,
    )
    end_of_text, im_end, audio = ids(tokenizer, END_OF_TEXT, IM_END, AUDIO)
    config = Qwen2AudioConfig(
        text_config=dict(
            model_type="qwen2",
            **text_sizes(options, tokenizer, grouped=False),
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
            bos_token_id=end_of_text,
            eos_token_id=im_end,
            pad_token_id=end_of_text,
            tie_word_embeddings=False,
        ),
        audio_config=dict(model_type="qwen2_audio_encoder", **whisper_tower()),
        audio_token_index=audio,
        tie_word_embeddings=False,
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(**MEL, chunk_length=30, return_attention_mask=True),
        tokenizer=tokenizer,
        chat_template=templates.QWEN2_AUDIO,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[end_of_text, im_end])
    return Blueprint(Qwen2AudioForConditionalGeneration, config, tokenizer, processor, generation, (AUDIO,))


def voxtral(options: Options) -> Blueprint:
    """Voxtral-Mini-3B in small: every started window of 30 s becomes 375 features.

    The tokenizer is an ordinary one with the published special ids. (The published model has ``tekken.json`` instead,
    which needs ``mistral_common``, and no chat template of its own.)
    """
    tokenizer = tekken_tokenizer(
        options.vocab_size,
        VOXTRAL_TOKENS,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=131072,
        chat_template=templates.VOXTRAL,
    )
    bos, eos, pad, audio = ids(tokenizer, "<s>", "</s>", "<pad>", "[AUDIO]")
    config = VoxtralConfig(
        text_config=dict(
            model_type="llama",
            **text_sizes(options, tokenizer),
            head_dim=2 * options.head_dim,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=100_000_000.0),
            bos_token_id=bos,
            eos_token_id=eos,
            tie_word_embeddings=False,
        ),
        audio_config=dict(
            model_type="voxtral_encoder",
            **TOWER,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,  # four neighbouring frames make a feature
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        audio_token_id=audio,
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )
    processor = VoxtralProcessor(WhisperFeatureExtractor(**MEL, chunk_length=30), tokenizer)
    generation = dict(bos_token_id=bos, pad_token_id=pad, eos_token_id=eos)
    silent = tuple(token for token in VOXTRAL_TOKENS if token not in ("<s>", "</s>", "[INST]", "[/INST]"))
    return Blueprint(VoxtralForConditionalGeneration, config, tokenizer, processor, generation, silent)


def qwen2_5_omni_thinker(options: Options) -> Blueprint:
    """The thinker of Qwen2.5-Omni in small: pictures and clips as Qwen2.5-VL, recordings up to 300 s in windows of 2 s."""
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        CHAT_TOKENS + OMNI_TOKENS,
        extra_special_tokens=OMNI_NAMES,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=32768,
        chat_template=templates.QWEN2_5_OMNI,
    )
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    image, audio, video, vision_start, vision_end, audio_start, audio_end = ids(tokenizer, *OMNI_NAMES.values())
    rope = dict(rope_type="default", rope_theta=1_000_000.0, mrope_section=mrope_section(options.head_dim))
    config = Qwen2_5OmniThinkerConfig(
        text_config=dict(
            **text_sizes(options, tokenizer),
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_parameters=rope,
            bos_token_id=end_of_text,
            eos_token_id=im_end,
            pad_token_id=end_of_text,
            tie_word_embeddings=False,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            out_hidden_size=options.hidden_size,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=TEMPORAL,
            window_size=112,
            fullatt_block_indexes=[1],
        ),
        audio_config=whisper_tower(n_window=100, output_dim=options.hidden_size),
        image_token_index=image,
        audio_token_index=audio,
        video_token_index=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        audio_start_token_id=audio_start,
        audio_end_token_id=audio_end,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
        tie_word_embeddings=False,
    )
    sizes: dict[str, Any] = dict(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=TEMPORAL, size=PIXELS_2_5)
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=Qwen2VLVideoProcessor(**sizes),
        feature_extractor=WhisperFeatureExtractor(**MEL, chunk_length=300, return_attention_mask=True),
        tokenizer=tokenizer,
        chat_template=templates.QWEN2_5_OMNI,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    silent = ("<|IMAGE|>", AUDIO, "<|VIDEO|>", "<|vision_pad|>", "<|vision_bos|>", AUDIO_BOS)
    return Blueprint(Qwen2_5OmniThinkerForConditionalGeneration, config, tokenizer, processor, generation, silent)
