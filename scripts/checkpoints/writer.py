"""Puts a blueprint on disk as a hub repository would hold it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from scripts.checkpoints import weights
from scripts.checkpoints.blueprint import Blueprint, ids

OWN_FILES = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "*processor_config.json",
)


def say(line: str) -> None:
    """A line of progress, apart from standard output."""
    print(line, file=sys.stderr, flush=True)


def clear(out: Path) -> None:
    """Remove the files of an earlier checkpoint; anything else in ``out`` stays."""
    for pattern in OWN_FILES:
        for path in out.glob(pattern):
            path.unlink()


def write(blueprint: Blueprint, out: Path, *, seed: int, dtype: str, shard_size: str) -> None:
    """Write config, generation config, sharded weights, tokenizer and processor files into ``out``."""
    disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    clear(out)
    write_weights(blueprint, out, seed, dtype, shard_size)
    if blueprint.processor is None:
        blueprint.tokenizer.save_pretrained(out)
    else:
        write_processor(blueprint, out)
    for path in sorted(out.iterdir()):
        say(f"  {path.name:<40} {path.stat().st_size:>9} bytes")


def write_weights(blueprint: Blueprint, out: Path, seed: int, dtype: str, shard_size: str) -> None:
    model = weights.build(blueprint.model_class, blueprint.config, seed)
    rows = blueprint.config.get_text_config().vocab_size
    unused = range(len(blueprint.tokenizer), rows)
    weights.silence(model, [*ids(blueprint.tokenizer, *blueprint.silent), *unused])
    model.generation_config = GenerationConfig(do_sample=False, **blueprint.generation)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{blueprint.model_class.__name__}: {parameters} parameters, {len(blueprint.tokenizer)} tokens in {rows} rows")
    model.to(getattr(torch, dtype)).save_pretrained(out, max_shard_size=shard_size)


def write_processor(blueprint: Blueprint, out: Path) -> None:
    """``processor_config.json`` as transformers 5 writes it, and the older files that hub repositories have."""
    processor = blueprint.processor
    assert processor is not None
    processor.save_pretrained(out)
    for name in ("image_processor", "video_processor", "feature_extractor"):
        part = getattr(processor, name, None)
        if part is not None:
            keep_earlier(out / "preprocessor_config.json", lambda part=part: part.save_pretrained(out))


def keep_earlier(path: Path, save: Callable[[], object]) -> None:
    """Run ``save``; the keys that the JSON file had before stay: a picture's and a recording's settings share one file."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    save()
    if earlier:
        path.write_text(json.dumps(earlier | json.loads(path.read_text()), indent=2, sort_keys=True) + "\n")
