"""The untrained embedded model: tokenizer, processor and a small Qwen2-VL with fan-in initialisation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from scripts.embedded import pictures, questions

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus(samples: int = 6000):
    """Questions and answers in the proportions of training, for the tokenizer's merges."""
    rng = random.Random(1)
    for _ in range(samples):
        picture = pictures.scene(rng, 6, 6) if rng.random() < 0.7 else pictures.number(rng, 3, 4, rng.choice([1, 2]))
        for _kind, question, answer in questions.ask(rng, picture):
            yield question
            yield answer
        yield from questions.chat(rng)
    for _ in range(600):
        yield from ("user\n", "assistant\n", "system\n", "You are a helpful assistant.", questions.NO_PICTURE)


def build_tokenizer(vocab_size: int = 640) -> Qwen2Tokenizer:
    """A byte-level BPE like Qwen2's, digits apart, whose merges are the words of our questions."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus(), trainer)
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, unk_token=None, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=(len(tokenizer) + 63) // 64 * 64,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 10, 10]),
            bos_token_id=ids["<|endoftext|>"],
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
        ),
        vision_config=dict(
            depth=5,
            embed_dim=160,
            hidden_size=192,
            num_heads=4,
            mlp_ratio=4,
            patch_size=pictures.PATCH,
            spatial_merge_size=2,
            temporal_patch_size=2,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.generation_config.bos_token_id = None
    fan_in_init(model, seed)
    return model


@torch.no_grad()
def fan_in_init(model: Qwen2VLForConditionalGeneration, seed: int) -> None:
    """std 1/sqrt(fan-in), residual outputs damped: at this width the usual 0.02 starts with a long plateau."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed_tokens" not in name:
            residual = any(part in name for part in ("o_proj", "down_proj", "attn.proj", "fc2"))
            std = (0.35 if residual else 1.0) * parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.model.language_model.embed_tokens.weight.normal_(0, 0.07, generator=generator)
    matching_head(model.model.language_model.layers[1].self_attn, generator)


@torch.no_grad()
def matching_head(attention: nn.Module, generator: torch.Generator) -> None:
    """Start the last key-value head, and the queries that share it, as "look where your own word is said".

    Queries and keys are one random projection, in the head's slowest frequencies, where position hardly matters. Whether a
    picture shows a word is an equality of two things that each say nothing alone; without this start it is not found.
    """
    size, hidden = attention.head_dim, attention.k_proj.weight.shape[1]
    still = torch.cat([torch.arange(size // 2 - 10, size // 2), torch.arange(size - 10, size)])
    projection = 1.2 * torch.randn(len(still), hidden, generator=generator) * hidden**-0.5
    kv_heads = attention.k_proj.weight.shape[0] // size
    heads = attention.q_proj.weight.shape[0] // size
    for linear, first, last in ((attention.k_proj, kv_heads - 1, kv_heads), (attention.q_proj, heads - heads // kv_heads, heads)):
        linear.weight[first * size : last * size] = 0
        linear.bias[first * size : last * size] = 0
        for head in range(first, last):
            linear.weight[head * size + still] = projection


def save_processor(tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Tokenizer, chat template and processor files as ``AutoProcessor`` expects them."""
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": pictures.MIN_PIXELS, "longest_edge": pictures.MAX_PIXELS}
    image = Qwen2VLImageProcessorPil(size=size, patch_size=pictures.PATCH)
    video = Qwen2VLVideoProcessor(size=size, patch_size=pictures.PATCH)
    Qwen2VLProcessor(
        image_processor=image, tokenizer=tokenizer, video_processor=video, chat_template=CHAT_TEMPLATE
    ).save_pretrained(out)
