"""What it costs to count a picture: probe and layout from the bytes of a JPEG, large and small, against transformers' processor.
A section of :mod:`bench.gateway`.

Each way starts from the same bytes and ends with token ids: ours by the headers, transformers' by decoding, resizing and writing
the prompt. One thread, run in turn, round after round; figures are medians of CPU time.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bench.measure import Cost, cost_of, interleave, median
from bench.preprocess import photo
from scripts.make_checkpoint import main as make_checkpoint
from services.gateway.probe import probe_image
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.layout import PromptLayout, Turn

FAMILIES = ("qwen2_vl", "llava_next", "idefics3")
CHECKPOINTS = Path("build/checkpoints")  # tiny ones, made when they are missing
ROUNDS = 9
SIZES = ((100, 100), (4000, 3000))
QUESTION = "what is it?"
TIMES = 20  # of ours, which is too short for the clock once


def ways(path: Path, data: bytes) -> dict[str, Callable[[], list[int]]]:
    """From the bytes to token ids: headers, plan and prompt; those with the digest of the bytes; and the processor."""
    checkpoint, processor = open_checkpoint(str(path)), transformers.AutoProcessor.from_pretrained(path)
    layout = PromptLayout(checkpoint)

    def counted() -> list[int]:
        picture = probe_image(data, "image", max_pixels=50_000_000)
        return layout.lay_out([Turn("user", (*checkpoint.plan([picture]), QUESTION))]).token_ids

    def named() -> list[int]:
        hashlib.sha256(data).digest()
        return counted()

    def processed() -> list[int]:
        content = [{"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")}, {"type": "text", "text": QUESTION}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids: list[int] = inputs["input_ids"][0].tolist()
        return ids

    return {"ours": counted, "ours with SHA-256": named, "transformers": processed}


def measure(family: str, path: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each size and way."""
    runs: dict[str, Callable[[], Cost]] = {}
    tokens = {}
    for width, height in SIZES:
        made = ways(path, photo(width, height))
        ids = {way: run() for way, run in made.items()}
        assert ids["ours"] == ids["transformers"], f"{family} {width}x{height}"
        for way, run in made.items():
            name = f"{width}x{height} {way}"
            tokens[name] = len(ids[way])
            times = 1 if way == "transformers" else TIMES
            runs[name] = lambda run=run, times=times: cost_of(lambda: [run() for _ in range(times)])
    found = interleave(runs, rounds)
    cpu = {name: median(costs).cpu / (1 if name.endswith("transformers") else TIMES) for name, costs in found.items()}
    rows = []
    for name, seconds in cpu.items():
        size, way = name.split(" ", 1)
        rows.append(
            {
                "family": family,
                "picture": size,
                "by": way,
                "tokens": tokens[name],
                "CPU ms": round(seconds * 1e3, 3),
                "to the small one": round(seconds / cpu[f"100x100 {way}"], 2),
                "transformers to it": round(cpu[f"{size} transformers"] / seconds, 1),
            }
        )
    return rows


def counting() -> list[dict[str, Any]]:
    """A row for each family, size and way."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for family in FAMILIES:
        path = CHECKPOINTS / family
        if not path.is_dir():
            make_checkpoint(["--family", family, "--out", str(path), "--seed", "11"])
        rows += measure(family, path, ROUNDS)
    return rows
