"""Times the encoder on a CPU: packed batches against items one by one, and the first rows of an item against all of them.

Every section runs what it compares in turn, round after round, and reports medians. Towers are random, of a few million
parameters; decoding and preprocessing are done before the clock starts. Run it with OMP_NUM_THREADS=1 and with a core to spare.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.command import new_parser, report, say
from bench.measure import Cost, cost_of, interleave, median
from scripts.checkpoints.blueprint import Options
from scripts.checkpoints.registry import FAMILIES
from scripts.checkpoints.writer import write
from services.encoder.batcher import Batcher
from services.encoder.families import schemes_of
from services.encoder.features import Features
from services.encoder.pipeline import Pipeline, Planned
from services.encoder.preprocess import Decoded, Prepared, Preprocessor
from services.encoder.reader import Chunk, read
from services.encoder.store import Done, Store
from services.encoder.towers import Towers
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.media import ALL_FRAMES, Clip, ItemPlan

EXAMPLES = """examples:
  OMP_NUM_THREADS=1 python -m bench.encoder
  OMP_NUM_THREADS=1 python -m bench.encoder --sections batch --dtypes float32 --images 8 32 128
  OMP_NUM_THREADS=1 python -m bench.encoder --sections pieces --json pieces.json
"""
TOWERS = {  # what differs from the small checkpoints' vision_config
    "qwen2_vl": {"depth": 6, "embed_dim": 256, "num_heads": 4},
    "internvl": {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
}
BUDGET = 16384  # patches of a batch, the service's default
PICTURE = (1344, 896)  # pixels; six tiles and the view of the whole
CLIP = (224, 224, 32)  # pixels, frames


class Bench:
    """The encoder half of a family with towers of a few million parameters."""

    def __init__(self, folder: Path, family: str, dtype: str, sizes: dict[str, int]) -> None:
        blueprint = FAMILIES[family](Options(hidden_size=512, layers=1))
        for name, value in sizes.items():
            setattr(blueprint.config.vision_config, name, value)
        write(blueprint, folder, seed=0, dtype="float32", shard_size="1GB")
        self.checkpoint = open_checkpoint(str(folder))
        self.towers = Towers(self.checkpoint, dtype, "cpu")
        stock = getattr(transformers, self.checkpoint.family.architecture)
        self.stock = stock.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._preprocess = Preprocessor(self.checkpoint, tuple(schemes_of(family)))

    def picture(self, width: int, height: int) -> tuple[ItemPlan, Prepared]:
        return self._prepared(_noise(height, width), self.checkpoint.plan_image(width, height))

    def clip(self, width: int, height: int, frames: int) -> tuple[ItemPlan, Prepared]:
        (plan,) = self.checkpoint.plan([Clip(width, height, frames, 2.0)], ALL_FRAMES)
        return self._prepared(_noise(len(plan.frames), height, width), plan)

    def _prepared(self, medium: Decoded, plan: ItemPlan) -> tuple[ItemPlan, Prepared]:
        return plan, self._preprocess(medium, plan)


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


def batch(bench: Bench, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Small pictures of mixed sizes in batches as the service makes them, against one by one, and the stock model one by one."""
    rng = random.Random(1)
    rows = []
    for count in counts:
        items = [bench.picture(rng.randrange(56, 225), rng.randrange(56, 225))[1] for _ in range(count)]
        batches = _batches(items, min(BUDGET, bench.towers.batch_patches))

        def packed(batches: list[list[Prepared]] = batches) -> list[torch.Tensor]:
            return [rows for items in batches for (rows,) in bench.towers.encode(items)]

        def one_by_one(items: list[Prepared] = items) -> list[torch.Tensor]:
            return [bench.towers.encode([item])[0][0] for item in items]

        @torch.inference_mode()
        def stock(items: list[Prepared] = items) -> list[torch.Tensor]:
            return [bench.stock.get_image_features(**item.inputs, return_dict=True).pooler_output[0] for item in items]

        apart = max(float((ours - theirs).abs().max()) for ours, theirs in zip(packed(), stock(), strict=True))
        runs = {"packed": packed, "one by one": one_by_one, "transformers": stock}
        costs = interleave({name: (lambda run=run: cost_of(run)) for name, run in runs.items()}, rounds)
        cpu = {name: median(found).cpu for name, found in costs.items()}
        rows.append(
            {
                "pictures": count,
                "patches": sum(item.patches for item in items),
                "batches": len(batches),
                "packed_cpu_ms": round(cpu["packed"] * 1e3, 1),
                "one_by_one_cpu_ms": round(cpu["one by one"] * 1e3, 1),
                "transformers_cpu_ms": round(cpu["transformers"] * 1e3, 1),
                "packed_to_one_by_one": round(cpu["one by one"] / cpu["packed"], 2),
                "packed_to_transformers": round(cpu["transformers"] / cpu["packed"], 2),
                "largest_difference": f"{apart:.0e}",
            }
        )
    return rows


def _batches(items: Sequence[Prepared], budget: int) -> list[list[Prepared]]:
    batches: list[list[Prepared]] = [[]]
    for item in items:
        if batches[-1] and sum(other.patches for other in batches[-1]) + item.patches > budget:
            batches.append([])
        batches[-1].append(item)
    return batches


@dataclass
class Times:
    """Seconds from an item's arrival, one for each run."""

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def pieces(
    name: str, bench: Bench, large: tuple[ItemPlan, Prepared], small: tuple[ItemPlan, Prepared], rounds: int
) -> dict[str, Any]:
    """From an item's arrival to its rows, in pieces and whole; and how long a small one takes that comes just after it."""
    times = {"pieces": Times(), "whole": Times()}
    splits = {"pieces": bench.towers.split, "whole": lambda item: [item]}

    def run(kind: str) -> Callable[[], Cost]:
        return lambda: cost_of(lambda: asyncio.run(_stream(bench.towers, splits[kind], large, None, times[kind])))

    costs = interleave({kind: run(kind) for kind in splits}, rounds)
    for _ in range(rounds):
        for kind in splits:
            asyncio.run(_stream(bench.towers, splits[kind], large, small, times[kind]))
    return {
        "item": name,
        "patches": large[0].patches,
        "pieces": len(bench.towers.split(large[1])),
        "first_rows_ms": round(statistics.median(times["pieces"].first[1:]) * 1e3, 1),
        "all_rows_ms": round(statistics.median(times["pieces"].last[1:]) * 1e3, 1),
        "whole_ms": round(statistics.median(times["whole"].last[1:]) * 1e3, 1),
        "cpu_of_pieces": round(median(costs["pieces"]).cpu / median(costs["whole"]).cpu, 2),
        "small_item_ms": round(statistics.median(times["pieces"].beside) * 1e3, 1),
        "small_item_beside_whole_ms": round(statistics.median(times["whole"].beside) * 1e3, 1),
    }


async def _stream(
    towers: Towers, split: Any, large: tuple[ItemPlan, Prepared], small: tuple[ItemPlan, Prepared] | None, times: Times
) -> None:
    """Encode the large item and read it; where there is a small one, it comes when the towers have begun with the large."""
    begun = threading.Event()

    def encode(batch: Sequence[Prepared]) -> list[Features]:
        begun.set()
        return towers.encode(batch)

    async def decode(planned: Planned, data: bytes) -> Any:
        return None

    def preprocess(planned: Planned, decoded: Any) -> Prepared:
        return next(prepared for plan, prepared in (large, small or large) if plan is planned.plan)

    store = Store(60)
    pipeline = Pipeline(store, Batcher(encode, min(BUDGET, towers.batch_patches)), decode, preprocess, split, 2)

    async def rows(plan: ItemPlan) -> tuple[float, float]:
        started, first = time.perf_counter(), 0.0
        async with aclosing(read(store, [(pipeline.submit(uuid.uuid4().bytes, Planned(plan, ""), b""), 0)], 1 << 20)) as events:
            async for _, event in events:
                now = time.perf_counter() - started
                if isinstance(event, Chunk):
                    first = first or now
                elif isinstance(event, Done):
                    return first, now
        raise RuntimeError("the item was not encoded")

    encoding = asyncio.create_task(rows(large[0]))
    if small is not None:
        await asyncio.to_thread(begun.wait)
        times.beside.append((await rows(small[0]))[1])
        await encoding
    else:
        first, last = await encoding
        times.first.append(first)
        times.last.append(last)
    await pipeline.stop()


def run_batch(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """The section ``batch``."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "qwen2_vl", dtype, TOWERS["qwen2_vl"] if not options.tiny else {})
        return batch(bench, options.images, options.rounds)


def run_pieces(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """The section ``pieces``."""
    found = []
    for family, name in (("internvl", "picture of 7 tiles"), ("qwen2_vl", "video of 32 frames")):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), family, dtype, TOWERS[family] if not options.tiny else {})
            large = bench.picture(*PICTURE) if family == "internvl" else bench.clip(*CLIP)
            found.append(pieces(name, bench, large, bench.picture(112, 112), options.rounds))
    return found


SECTIONS: dict[str, Callable[[argparse.Namespace, str], list[dict[str, Any]]]] = {"batch": run_batch, "pieces": run_pieces}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that were asked for."""
    parser = new_parser("bench.encoder", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to run (default: all)")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"), help="default: both")
    add("--images", nargs="+", type=int, default=[32], help="batch: pictures in a batch (default: 32)")
    add("--rounds", type=int, default=7, help="measured rounds (default %(default)s)")
    add("--tiny", action="store_true", help="towers of the test checkpoints: only shows that everything runs")
    options = parser.parse_args(arguments)
    if options.rounds < 5 and not options.tiny:
        parser.error(f"--rounds must be at least 5 for a median that means something, got {options.rounds}")
    if int(os.environ.get("OMP_NUM_THREADS", "0")):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    results: dict[str, list[dict[str, Any]]] = {}
    for section in options.sections:
        results[section] = [{"dtype": dtype, **row} for dtype in options.dtypes for row in SECTIONS[section](options, dtype)]
        say(f"{section} done")
    report("bench.encoder", options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
