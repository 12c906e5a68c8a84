"""Steady text beside a flood of pictures, on two cores: ``python -m bench.beside``.

A few readers ask for text, each again as soon as it is answered, for a while by themselves and for a while beside pictures that
arrive at random moments (open loop; each new to every cache). Alone and beside take turns, engine after engine, round after
round; what counts is the time between a text's tokens. Of Triptych the encoder is pinned to the first core, gateway and language
model to the second; vLLM's server (over HTTP, like ours) may use both. This client is pinned to the first core.

Options of our services are set by their environment variables, such as TRIPTYCH_MAX_NUM_BATCHED_TOKENS=256.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arrivals import Record, closed_loop, open_loop, quantiles
from bench.command import listed, new_parser, report, say
from bench.incumbents.client import Ended
from bench.incumbents.vllm_server import NAME, vllm_server
from bench.processes import Meter, pin, services_under
from bench.targets import Http
from bench.workloads import Job, Sizes, make_jobs
from scripts.local_stack import local_stack

EXAMPLES = """examples:
  OMP_NUM_THREADS=1 python -m bench.beside --checkpoints .bench/checkpoints --vllm .venv-vllm/bin/python
  OMP_NUM_THREADS=1 python -m bench.beside --checkpoints .bench/checkpoints --engines triptych-chat --image-rate 0.5,1,2
"""
TARGET = 1.3
TEXT = Sizes(words=60, max_tokens=64)
IMAGE = Sizes(max_tokens=16)


@dataclass(frozen=True)
class Engine:
    """A server under test."""

    name: str
    dtype: str
    address: str
    model: str
    processes: dict[str, int]


@dataclass(frozen=True)
class Heard:
    """What came of one stretch: records of texts and of pictures, and CPU seconds of the server's processes."""

    texts: list[Record]
    pictures: list[Record]
    cpu: dict[str, float]
    seconds: float


async def listen(engine: Engine, args: argparse.Namespace, pictures: Sequence[Job], rate: float, seed: int) -> Heard:
    """Readers for so many seconds, beside those pictures where there are any."""
    target = Http(engine.address, engine.model)
    texts = make_jobs("text", args.readers * max(4, int(10 * args.seconds)), seed, TEXT)
    await closed_loop(target, texts[:2], 1)  # connections are open, nothing is left of the last stretch
    meter, started = Meter(engine.processes), time.perf_counter()
    flood = asyncio.create_task(_flood(engine, pictures, rate, seed))
    heard = await closed_loop(target, _until(started + args.seconds, texts[2:]), args.readers)
    seconds, cpu = time.perf_counter() - started, meter.read()["cpu_s"]
    flood.cancel()
    seen = await flood
    await target.close()
    return Heard(heard, seen, cpu, seconds)


async def _flood(engine: Engine, pictures: Sequence[Job], rate: float, seed: int) -> list[Record]:
    """Until it is cancelled; what was asked by then."""
    target = Http(engine.address, engine.model)
    records: list[Record] = []
    with contextlib.suppress(asyncio.CancelledError):
        await open_loop(target, pictures, rate, seed, records)
    await target.close()
    return records


def _until(end: float, jobs: Sequence[Job]) -> Iterator[Job]:
    for job in jobs:
        if time.perf_counter() >= end:
            return
        yield job


def row_of(engine: Engine, rate: float, alone: Sequence[Heard], beside: Sequence[Heard]) -> dict[str, Any]:
    """All rounds of an engine: percentiles of each round, of which medians count."""
    between = [[quantiles([gap for r in heard.texts for gap in r.gaps]) for heard in side] for side in (alone, beside)]
    first = [[quantiles([r.ttft for r in heard.texts]) for heard in side] for side in (alone, beside)]

    def middle(side: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(found[name] for found in side)

    p99 = [middle(side, "p99") for side in between]
    seconds, pictures = sum(h.seconds for h in beside), [r.outcome for h in beside for r in h.pictures]
    outcomes = [*pictures, *(r.outcome for heard in (*alone, *beside) for r in heard.texts)]
    return {
        "engine": engine.name,
        "dtype": engine.dtype,
        "pictures/s": rate,
        "asked about": len(pictures),
        "answered": pictures.count("answered"),
        "between tokens ms p50/p99 alone": f"{middle(between[0], 'p50'):.0f}/{p99[0]:.0f}",
        "beside": f"{middle(between[1], 'p50'):.0f}/{p99[1]:.0f}",
        "p99 beside / alone": round(p99[1] / p99[0], 2),
        "target": TARGET,
        "TTFT ms p50/p99 alone": f"{middle(first[0], 'p50'):.0f}/{middle(first[0], 'p99'):.0f}",
        "TTFT beside": f"{middle(first[1], 'p50'):.0f}/{middle(first[1], 'p99'):.0f}",
        "text tokens/s alone": _tokens_per_second(alone),
        "tokens/s beside": _tokens_per_second(beside),
        "cores used beside": round(sum(h.cpu["all"] for h in beside) / seconds, 2),
        "failed": sum(outcome not in ("answered", "cut off") for outcome in outcomes),
    }


def _tokens_per_second(side: Sequence[Heard]) -> float:
    return round(statistics.median(sum(r.tokens for r in h.texts) / h.seconds for h in side), 1)


def measure(engines: Sequence[Engine], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine and rate of pictures."""
    found: dict[tuple[str, float], tuple[list[Heard], list[Heard]]] = {}
    for number in range(1, args.rounds + 1):
        for rate in args.image_rate:
            for engine in engines:
                seed = 1000 * number + int(100 * rate)
                pictures = make_jobs("image", int(1.5 * rate * args.seconds) + 5, seed, IMAGE)
                sides = found.setdefault((engine.name + engine.dtype, rate), ([], []))
                for side, flood in zip(sides, ([], pictures), strict=True):
                    side.append(asyncio.run(listen(engine, args, flood, rate, seed + bool(flood))))
                p99 = [quantiles([gap for r in side[-1].texts for gap in r.gaps]).get("p99") for side in sides]
                where = f"round {number} of {args.rounds}, {engine.name} {engine.dtype}, {rate:g} pictures/s"
                say(f"{where}: p99 between tokens {p99[0]} ms alone, {p99[1]} beside")
    return [row_of(e, rate, *found[e.name + e.dtype, rate]) for rate in args.image_rate for e in engines]


def start(args: argparse.Namespace, folder: Path, resources: contextlib.ExitStack) -> tuple[list[Engine], list[dict[str, str]]]:
    """Every engine that starts, pinned, and why others are missing."""
    engines, left_out = [], []
    for dtype in args.dtypes:
        model = args.checkpoints / f"vision-{dtype}"
        for name in args.engines:
            say(f"starting {name} {dtype}")
            if name.startswith("triptych"):
                flags = ("--model", str(model), "--dtype", dtype, "--profile", name.partition("-")[2] or "mixed")
                stack = resources.enter_context(local_stack(*flags, quiet=True))
                services = services_under(stack.process.pid)
                for service, pid in services.items():
                    pin(pid, args.cores[:1] if service == "encoder" else args.cores[1:])
                engines.append(Engine(name, dtype, f"http://{stack.http_address}/v1", "default", services))
                continue
            threads = int(name.removeprefix("vllm-"))
            try:
                if not args.vllm:
                    raise Ended("no --vllm")
                server = vllm_server(args.vllm, model, dtype, threads, folder / f"{name}-{dtype}.log")
                address, pid = resources.enter_context(server)
            except Ended as ended:
                left_out.append({"engine": name, "dtype": dtype, "why": str(ended).replace("\n", " ")})
                continue
            pin(pid, args.cores)
            engines.append(Engine(f"{name} thread{'s' * (threads > 1)}", dtype, address, NAME, {"vllm": pid}))
    return engines, left_out


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = new_parser("bench.beside", __doc__, EXAMPLES)
    add = parser.add_argument
    names = ("triptych-chat", "triptych-mixed", "vllm-1", "vllm-2")
    add("--checkpoints", type=Path, required=True, help="folder that bench.checkpoints wrote; the vision model answers all")
    add(
        "--engines",
        type=listed(str, names),
        default=list(names),
        help=f"of {', '.join(names)}: our profile, its threads (default all)",
    )
    add("--dtypes", type=listed(str, ("float32", "bfloat16")), default=["bfloat16"], help="(default bfloat16)")
    add("--vllm", default="", metavar="PYTHON", help="python of a virtual environment with vllm")
    add("--cores", type=listed(int), default=sorted(os.sched_getaffinity(0))[:2], help="two of them (default the first two)")
    add("--readers", type=int, default=2, help="texts at a time (default %(default)s)")
    add("--image-rate", type=listed(float), default=[1.0], help="pictures a second, several by commas (default 1)")
    add("--seconds", type=float, default=30.0, help="of each stretch (default %(default)s)")
    add("--rounds", type=int, default=5, help="rounds; medians count (default %(default)s)")
    args = parser.parse_args(argv)
    if len(args.cores) != 2:
        parser.error(f"--cores takes two, got {args.cores}")
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        engines, left_out = start(args, folder, resources)
        os.sched_setaffinity(0, args.cores[:1])
        rows = measure(engines, args)
    report("bench.beside", args.json, {"beside": rows, "left out": left_out}, medians_of=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
