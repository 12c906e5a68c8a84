"""Text families whose attention or rotary positions depend on how long a sequence is, and Qwen3."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from scripts.checkpoints import templates
from scripts.checkpoints.blueprint import Blueprint, Options, ids, text_sizes
from scripts.checkpoints.qwen import CHAT_TOKENS, END_OF_TEXT, IM_END
from scripts.checkpoints.tokenizers import llama2_tokenizer, qwen2_tokenizer

MISTRAL_WINDOW = 32  # published 4096: small enough here that short prompts reach past it
PHI3_TOKENS = [END_OF_TEXT, "<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|placeholder2|>", "<|user|>"]
PHI3_SHORT, PHI3_LONG = 64, 2048  # published 4096 and 131072: a 32-fold extension as there


def qwen3(options: Options) -> Blueprint:
    """Qwen3-0.6B in small: normed queries and keys, heads wider than the model's share, thoughts in the template."""
    tokenizer = qwen2_tokenizer(
        options.vocab_size,
        CHAT_TOKENS,
        visible=["<think>", "</think>"],
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=131072,
        chat_template=templates.QWEN3,
    )
    end_of_text, im_end = ids(tokenizer, END_OF_TEXT, IM_END)
    config = Qwen3Config(
        **text_sizes(options, tokenizer),
        head_dim=2 * options.head_dim,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=im_end,
    )
    generation = dict(bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[im_end, end_of_text])
    return Blueprint(Qwen3ForCausalLM, config, tokenizer, generation=generation)


def mistral(options: Options) -> Blueprint:
    """Mistral-7B-Instruct-v0.1 in small: every layer attends to the last ``MISTRAL_WINDOW`` tokens only."""
    tokenizer = llama2_tokenizer(options.vocab_size, [], model_max_length=32768, chat_template=templates.MISTRAL)
    bos, eos = ids(tokenizer, "<s>", "</s>")
    config = MistralConfig(
        **text_sizes(options, tokenizer),
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        sliding_window=MISTRAL_WINDOW,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    return Blueprint(MistralForCausalLM, config, tokenizer, generation=dict(bos_token_id=bos, eos_token_id=eos))


def phi3(options: Options) -> Blueprint:
    """Phi-3-mini-128k-instruct in small: LongRoPE, whose frequencies change when a sequence passes ``PHI3_SHORT`` tokens."""
    tokenizer = llama2_tokenizer(
        options.vocab_size,
        PHI3_TOKENS,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=PHI3_LONG,
        chat_template=templates.PHI3,
        eos_token=END_OF_TEXT,
    )
    bos, end_of_text, assistant, end = ids(tokenizer, "<s>", END_OF_TEXT, "<|assistant|>", "<|end|>")
    pairs = options.head_dim // 2
    rope = dict(
        rope_type="longrope",
        rope_theta=10_000.0,
        short_factor=[1.0 + 0.05 * pair for pair in range(pairs)],
        long_factor=[1.0 + 63.0 * pair / pairs for pair in range(pairs)],
    )
    config = Phi3Config(
        **text_sizes(options, tokenizer, grouped=False),
        max_position_embeddings=PHI3_LONG,
        original_max_position_embeddings=PHI3_SHORT,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    generation = dict(bos_token_id=bos, pad_token_id=end_of_text, eos_token_id=[end_of_text, assistant, end])
    silent = ("<|placeholder1|>", "<|placeholder2|>")
    return Blueprint(Phi3ForCausalLM, config, tokenizer, generation=generation, silent=silent)
