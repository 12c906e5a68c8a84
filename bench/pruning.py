"""What visual token pruning (FastV) saves and what it costs: KV memory, time and agreement, by layer and share.

Every question is asked of one engine that prunes nothing and of one engine per K, one request at a time and in turn, so
that a noisy neighbour meets all of them. Two workloads: the embedded model answering questions about drawings, and a
random qwen2_vl checkpoint with long pictures, whose answers mean nothing but whose time and memory do.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from bench.measure import host_facts, write_figures
from services.llm.config import LlmConfig
from services.llm.engine import Engine, Request
from services.llm.events import Finished, Token
from services.llm.kv_cache import KvCache
from services.llm.merge import MediaRun
from services.llm.model_runner import ModelRunner
from services.llm.request import GenerateArguments
from services.llm.sampler import Sampling
from services.llm.scheduler import Chunk, Scheduler
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.hf import transformers
from services.models.media import Grid, Modality

EXAMPLES = """examples:
  python -m bench.pruning                                  both workloads, K = 1, 2, 3
  python -m bench.pruning --questions 400 --pictures 0     the embedded model alone
  python -m bench.pruning --layers 2 --keep 1 0.5 --json build/pruning.json"""


@dataclass(frozen=True)
class Question:
    """A prompt with one picture's rows; ``expected`` is the right answer's tokens, None where there is none."""

    prompt: list[int]
    media: list[MediaRun]
    rows: torch.Tensor
    max_tokens: int
    expected: list[int] | None = None


@dataclass
class Tally:
    """What one setting did, question by question."""

    kv_bytes: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    equal: list[tuple[int, int]] = field(default_factory=list)  # tokens equal to the unpruned answer's, of how many
    same: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Means and medians."""
        tokens = sum(total for _, total in self.equal)
        return {
            "kv_bytes": round(statistics.mean(self.kv_bytes)),
            "blocks": [round(statistics.mean(counts), 1) for counts in zip(*self.blocks, strict=True)],
            "ms": round(1000 * statistics.median(self.seconds), 2),
            "cpu_ms": round(1000 * statistics.median(self.cpu_seconds), 2),
            "equal_tokens": round(sum(equal for equal, _ in self.equal) / tokens, 4),
            "equal_answers": round(statistics.mean(self.same), 4),
            "right": round(statistics.mean(self.right), 4) if self.right else None,
        }


class WatchedScheduler(Scheduler):
    """Remembers the most blocks that were held at once, by group."""

    peak: list[int]

    def schedule(self, prompt_tokens: int | None = None) -> list[Chunk]:
        chunks = super().schedule(prompt_tokens)
        held = [pool.total - pool.available for pool in self.kv.pools]
        self.peak = [max(pair) for pair in zip(self.peak, held, strict=True)]
        return chunks


class Subject:
    """An engine in this process, asked one question at a time."""

    def __init__(self, checkpoint: Checkpoint, pruning: str) -> None:
        config = LlmConfig(
            dtype="float32", device="cpu", threads=1, max_num_seqs=1, max_num_batched_tokens=4096, max_model_len=2048,
            kv_cache_memory_bytes=256 << 20, visual_token_pruning=pruning,
        )  # fmt: skip
        self.runner = ModelRunner(checkpoint, config)
        # without the prefix cache every block that is held belongs to the request
        kv = KvCache(self.runner.groups, self.runner.block_size, enable_prefix_caching=False)
        self.scheduler = WatchedScheduler(kv, config.max_num_batched_tokens, config.max_num_seqs)
        self.engine = Engine(self.runner, self.scheduler)
        layers, group_of = self.runner.builder.layers, self.runner.builder.group_of
        self.block_bytes = [
            self.runner.block_size * sum(layer.token_bytes(4) for layer in layers.values() if group_of[layer.index] == g)
            for g in range(len(self.runner.groups))
        ]

    async def ask(self, question: Question, keep: float, tally: Tally, ends: frozenset[int]) -> list[int]:
        """The answer's tokens."""
        self.scheduler.peak = [0] * len(self.block_bytes)
        wall, cpu = time.perf_counter(), time.process_time()
        request = Request(
            GenerateArguments(
                id="", prompt=question.prompt, max_tokens=question.max_tokens, end_token_ids=ends, min_tokens=0, priority=0, n=1,
                media=question.media, digests=[b""] * len(question.media), salt=b"", sampling=Sampling(), grammar=None,
                include_first_logits=False, prompt_logprobs=None, visual_token_keep=keep,
            )
        )  # fmt: skip
        self.engine.submit(request)
        self.engine.write_rows(request, 0, 0, question.rows)
        tokens: list[int] = []
        done = False
        while not done:
            for event in await request.events.take():
                if isinstance(event, Token):
                    tokens.append(event.choice.token)
                elif isinstance(event, Finished):
                    done = True
                elif isinstance(event, Exception):
                    raise event
        tally.seconds.append(time.perf_counter() - wall)
        tally.cpu_seconds.append(time.process_time() - cpu)
        tally.blocks.append(self.scheduler.peak)
        tally.kv_bytes.append(sum(n * size for n, size in zip(self.scheduler.peak, self.block_bytes, strict=True)))
        return tokens


@torch.inference_mode()
def drawn(checkpoint: Checkpoint, count: int) -> Iterator[Question]:
    """Questions about drawings that the embedded model never saw, and their answers."""
    from scripts.embedded.evaluate import drawings

    model = getattr(transformers, checkpoint.family.architecture).from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(checkpoint.path)
    template = (checkpoint.path / "chat_template.jinja").read_text()
    for asked in islice(drawings(count), 0, 12 * count, 12):  # few of each picture's
        content = [{"type": "image"}, {"type": "text", "text": asked.text}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], template, add_generation_prompt=True)
        picture = Image.open(io.BytesIO(asked.image)).convert("RGB")
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
        grid = inputs["image_grid_thw"]
        rows = model.base_model.get_image_features(inputs["pixel_values"], grid, return_dict=True).pooler_output[0]
        prompt = inputs["input_ids"][0].tolist()
        run = MediaRun(
            Modality.IMAGE, prompt.index(checkpoint.placeholder_id(Modality.IMAGE)), len(rows), Grid(*grid[0].tolist())
        )
        yield Question(prompt, [run], rows, 48, processor.tokenizer(asked.answer)["input_ids"])


def long(checkpoint: Checkpoint, count: int, side: int) -> Iterator[Question]:
    """Random rows for pictures of ``side`` x ``side`` tokens, between words."""
    generator = torch.Generator().manual_seed(5)
    width = int(checkpoint.config["text_config"]["hidden_size"])
    image = checkpoint.placeholder_id(Modality.IMAGE)
    for _ in range(count):
        before, after = torch.randint(10, 200, (2, 12), generator=generator).tolist()
        rows = 0.05 * torch.randn(side * side, width, generator=generator)
        run = MediaRun(Modality.IMAGE, len(before), len(rows), Grid(1, 2 * side, 2 * side))
        yield Question([*before, *[image] * len(rows), *after], [run], rows, 32)


async def measure(
    checkpoint: Checkpoint, questions: list[Question], layers: list[int], keeps: list[float], ends: frozenset[int]
) -> list[dict[str, Any]]:
    """A row per K and share; the first is the engine that prunes nothing."""
    subjects = {0: Subject(checkpoint, "")} | {k: Subject(checkpoint, f"fastv:K={k}") for k in layers}
    settings = [(0, 1.0), *((k, keep) for k in layers for keep in keeps)]
    tallies: dict[tuple[int, float], Tally] = defaultdict(Tally)
    for subject in subjects.values():
        subject.engine.start(asyncio.get_running_loop())
        await subject.ask(questions[0], 1.0, Tally(), ends)  # warms it up
    for question in questions:
        whole: list[int] = []
        for k, keep in settings:
            tally = tallies[k, keep]
            tokens = await subjects[k].ask(question, keep, tally, ends)
            whole = whole or tokens
            pairs = zip(tokens, whole, strict=False)
            tally.equal.append((sum(a == b for a, b in pairs), max(len(tokens), len(whole))))
            tally.same.append(tokens == whole)
            if question.expected is not None:
                tally.right.append([t for t in tokens if t not in ends] == question.expected)
    for subject in subjects.values():
        subject.engine.stop()
    rows: list[dict[str, Any]] = []
    for k, keep in settings:
        row = {"K": k or None, "keep": keep, **tallies[k, keep].summary()}
        row["kv_share"] = round(row["kv_bytes"] / (rows[0] if rows else row)["kv_bytes"], 4)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| K | keep | blocks per answer | KV bytes | ms per answer | CPU ms | equal tokens | equal answers | right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        right = "-" if row["right"] is None else f"{row['right']:.1%}"
        cells = [
            str(row["K"] or "off"), f"{row['keep']:g}", " + ".join(f"{n:g}" for n in row["blocks"]), f"{row['kv_share']:.0%}",
            f"{row['ms']:.1f}", f"{row['cpu_ms']:.1f}", f"{row['equal_tokens']:.1%}", f"{row['equal_answers']:.1%}", right,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = argparse.ArgumentParser(
        prog="bench.pruning", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--questions", type=int, default=200, help="of the embedded model; 0 leaves it out (default %(default)s)")
    add("--pictures", type=int, default=12, help="long ones, of the random checkpoint; 0 leaves it out (default %(default)s)")
    add("--side", type=int, default=24, help="tokens along each side of a long picture (default %(default)s)")
    add("--layers", type=int, nargs="+", default=[1, 2, 3], metavar="K", help="first layers that drop tokens (default 1 2 3)")
    add("--keep", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25], help="shares (default 1 0.75 0.5 0.25)")
    add("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)
    from scripts.make_checkpoint import main as make_checkpoint

    workloads = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.questions:
            embedded = open_checkpoint("")
            asked = list(drawn(embedded, args.questions))
            workloads["embedded"] = asyncio.run(
                measure(embedded, asked, args.layers, args.keep, frozenset(embedded.end_token_ids))
            )
            print(f"embedded model, {len(asked)} questions about drawings\n\n{table(workloads['embedded'])}\n", flush=True)
        if args.pictures:
            options = ["--hidden-size", "256", "--layers", "8", "--shard-size", "1GB"]
            made = make_checkpoint(["--family", "qwen2_vl", "--out", f"{folder}/long", *options])
            assert made == 0, "no checkpoint was written"
            checkpoint = open_checkpoint(f"{folder}/long")
            asked = list(long(checkpoint, args.pictures, args.side))
            workloads["long"] = asyncio.run(measure(checkpoint, asked, args.layers, args.keep, frozenset()))
            tokens = args.side**2
            print(f"random qwen2_vl, 8 layers, {len(asked)} pictures of {tokens} tokens\n\n{table(workloads['long'])}\n")
    if args.json:
        write_figures(args.json, host_facts("bench.pruning"), workloads=workloads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
