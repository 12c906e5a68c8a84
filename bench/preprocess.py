"""Times pictures from the bytes of a JPEG to the towers' input: Pillow and numpy, transformers' two backends, and ours.

Everybody decodes for themselves and ends with the same tensor, one picture after the other, in one thread. What is compared
runs in turn, round after round; figures are medians of CPU time. Ours decodes as a worker does and prepares as the encoder does.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.command import new_parser, report
from bench.measure import Cost, cost_of, interleave, median
from services.decoding.images import decode_image
from services.decoding.specs import ImageSpec
from services.encoder.families import schemes_of
from services.encoder.families.audio import AUDIO
from services.encoder.pixels import copying_nothing, view
from services.models.hf import transformers
from services.models.media import Grid, ItemPlan, Modality

EXAMPLES = """examples:
  OMP_NUM_THREADS=1 python -m bench.preprocess
  OMP_NUM_THREADS=1 python -m bench.preprocess --sizes 640x480 --cases llava --rounds 21 --json build/preprocess.json
"""
MOST_PIXELS = 64 * 1024**2
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # family, class of its processor, settings of published files
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", {}),  # up to 1.0 megapixels: the limits of the class
    "qwen2_vl 12.8 MP": ("qwen2_vl", "Qwen2VL", {"min_pixels": 3136, "max_pixels": 12845056}),  # as files on the hub say
    "llava": ("llava", "Llava", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}),
}


def photo(width: int, height: int) -> bytes:
    """A JPEG of quality 90 that costs about what a photo does: soft shapes of all sizes under the noise of a sensor."""
    rng = np.random.default_rng(7)
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 9):
        shape = (max(2, height >> octave), max(2, width >> octave))
        layer = rng.normal(0, 8 * 1.6 ** (octave - 2), (*shape, 3)).astype(np.float32)
        for channel in range(3):
            soft = Image.fromarray(layer[:, :, channel]).resize((width, height), Image.Resampling.BICUBIC)
            pixels[:, :, channel] += np.asarray(soft)
    pixels += rng.normal(128, 3, (height, width, 1)).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def ways(family: str, name: str, settings: dict[str, Any], data: bytes) -> dict[str, Callable[[], torch.Tensor]]:
    """Each way from the bytes to ``pixel_values``."""
    fast = getattr(transformers, f"{name}ImageProcessor")(**settings)
    slow = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    own = copying_nothing(deepcopy(fast))
    prepare = schemes_of(family)[Modality.IMAGE].prepare

    def with_processor(processor: Any) -> torch.Tensor:
        return processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")["pixel_values"]

    def ours() -> torch.Tensor:
        made: list[np.ndarray] = []

        def allocate(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            made.append(np.empty(shape, dtype))
            return made[-1]

        decode_image(data, ImageSpec(MOST_PIXELS), allocate)
        height, width, _ = made[-1].shape
        plan = ItemPlan(Modality.IMAGE, 1, Grid(1, height, width), 1)
        return prepare(own, view(made[-1]), plan)["pixel_values"]

    def pillow() -> torch.Tensor:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        if family == "llava":
            return _llava(picture, fast.crop_size.height)
        return _qwen(picture, fast)

    return {
        "Pillow + numpy": pillow,
        "HF slow": lambda: with_processor(slow),
        "HF fast": lambda: with_processor(fast),
        "ours": ours,
    }


def _llava(picture: Image.Image, side: int) -> torch.Tensor:
    width, height = picture.size
    scale = side / min(width, height)
    picture = picture.resize((max(side, int(width * scale)), max(side, int(height * scale))), Image.Resampling.BICUBIC)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    pixels = np.asarray(picture.crop((left, top, left + side, top + side)), np.float32)
    return torch.from_numpy(_normalised(pixels).transpose(2, 0, 1)[None].copy())


def _qwen(picture: Image.Image, settings: Any) -> torch.Tensor:
    size = settings.resize(torch.empty(1, 3, picture.height, picture.width, device="meta"), settings.size, None, 28).shape[2:]
    pixels = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC), np.float32)
    cut = _normalised(pixels).reshape(size[0] // 28, 2, 14, size[1] // 28, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return torch.from_numpy(np.repeat(cut[:, :, :, :, :, None], 2, 5).reshape(-1, 1176))


def _normalised(pixels: np.ndarray) -> np.ndarray:
    return (pixels / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)


def pictures(sizes: list[tuple[int, int]], cases: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each size, case and way."""
    rows = []
    for width, height in sizes:
        data = photo(width, height)
        for case in cases:
            family, name, settings = CASES[case]
            made = ways(family, name, settings, data)
            expected = made["HF fast"]()
            levels = {way: _levels(run(), expected) for way, run in made.items()}
            costs = interleave({way: (lambda run=run: cost_of(run)) for way, run in made.items()}, rounds)
            own = median(costs["ours"]).cpu
            for way, found in costs.items():
                cpu = median(found).cpu
                most, mean = levels[way]
                rows.append(
                    {
                        "picture": f"{width}x{height}",
                        "for": case,
                        "by": way,
                        "CPU ms": round(cpu * 1e3, 1),
                        "pictures/s per core": round(1 / cpu, 1),
                        "ours is faster by": round(cpu / own, 2),
                        "levels off HF fast, most": round(most, 2),
                        "mean": round(mean, 3),
                    }
                )
    return rows


def _levels(made: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest and mean difference in levels of a byte."""
    assert made.shape == expected.shape, f"{tuple(made.shape)} instead of {tuple(expected.shape)}"
    off = (made - expected).abs() * (255 * max(STD))
    return float(off.max()), float(off.mean())


def recordings(seconds: list[float], rounds: int) -> list[dict[str, Any]]:
    """A row for each length and way, of the frames that qwen2_audio takes."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    rows = []
    for length in seconds:
        samples = np.random.default_rng(3).normal(0, 0.1, round(length * 16000)).astype(np.float32)
        plan = ItemPlan(Modality.AUDIO, 1, Grid(1, 1, 1), 1, samples=len(samples))
        padded = np.pad(samples, (0, max(0, extractor.n_samples - len(samples))))[None]

        def whole(samples: np.ndarray = samples) -> torch.Tensor:
            return extractor(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")["input_features"]

        def ours(samples: np.ndarray = samples, plan: ItemPlan = plan) -> torch.Tensor:
            return AUDIO["qwen2_audio"].prepare(extractor, samples, plan)["input_features"]

        runs: dict[str, Callable[[], Cost]] = {
            "HF, numpy": lambda padded=padded: cost_of(lambda: extractor._np_extract_fbank_features(padded, "cpu")),
            "HF, torch": lambda: cost_of(whole),
            "ours": lambda: cost_of(ours),
        }
        off = float((ours() - whole()).abs().max())
        costs = interleave(runs, rounds)
        own = median(costs["ours"]).cpu
        rows += [
            {
                "recording": f"{length:g} s",
                "by": way,
                "CPU ms": round(median(found).cpu * 1e3, 1),
                "ours is faster by": round(median(found).cpu / own, 2),
                "most that ours is off": f"{off:.1e}",
            }
            for way, found in costs.items()
        ]
    return rows


def _size(text: str) -> tuple[int, int]:
    width, height = map(int, text.split("x"))
    return width, height


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for."""
    parser = new_parser("bench.preprocess", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--sizes", nargs="*", type=_size, default=[(4000, 3000), (1280, 960)], help="WIDTHxHEIGHT (default: 4000x3000 1280x960)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    add("--seconds", nargs="*", type=float, default=[3.0, 30.0], help="lengths of recordings (default: 3 30)")
    add("--rounds", type=int, default=9, help="measured rounds, at least 5 (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error(f"--rounds must be at least 5 for a median that means something, got {options.rounds}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    transformers.logging.set_verbosity_error()
    results = {
        "pictures": pictures(options.sizes, options.cases, options.rounds),
        "recordings": recordings(options.seconds, options.rounds),
    }
    report("bench.preprocess", options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
