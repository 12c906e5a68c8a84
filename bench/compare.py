"""Triptych beside other engines, on the same checkpoints, requests and cores, in one run: ``python -m bench.compare``.

Each engine answers the same greedy requests, so many at a time, with one thread of tensor work and all of its processes on one
core, since two of a machine's may share what computes; rounds are interleaved. Of ours the CPU seconds of all services count
(gateway, encoder and language model, over gRPC), of the others those of their one process, which is given token ids and opened
pictures by a function call: their servers are not measured. An engine that ends is reported and left out.
`make bench-incumbents` prepares what it needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command import listed, new_parser, report, say
from bench.incumbents.client import Ended, Incumbent
from bench.measure import Cost, median
from bench.ours import Ours
from bench.processes import starting_on
from bench.requests import SIZES, Requests
from bench.workloads import Job

EXAMPLES = """examples:
  python -m bench.compare --checkpoints .bench/checkpoints --sections text --engines triptych-float32,padded-float32
  python -m bench.compare --checkpoints .bench/checkpoints --vllm .venv-vllm/bin/python --rounds 7 --json figures.json
"""
ENGINES = (
    "triptych-float32", "triptych-bfloat16",
    "vllm-float32", "vllm-bfloat16",
    "one-by-one-float32", "padded-float32", "padded-bfloat16",
    "openvino-f32", "openvino-bf16",
    "llama.cpp-F32",
)  # fmt: skip
SEQUENTIAL = "one-by-one"
Run = Callable[[list[Job], Path], Cost]


@dataclass
class Found:
    """What one section brought.

    Attributes:
        costs: of each engine and number of requests at a time, round by round.
        left_out: why an engine is missing.
    """

    costs: dict[tuple[str, int], list[Cost]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def measure(section: str, args: argparse.Namespace) -> Found:
    """Every engine in turn, round after round; the first round is not counted."""
    kind = "text" if section == "text" else "vision"
    found = Found()
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        requests = Requests(section, args.checkpoints / f"{kind}-float32", folder)
        runs: dict[str, Run] = {}
        for number, name in enumerate(args.engines, 1):
            say(f"{section}: starting {name} ({number} of {len(args.engines)})")
            with starting_on(args.cores):
                run = _start(name, kind, folder, args, resources)
            if run:
                runs[name] = run
            else:
                found.left_out[name] = "not here: its python, or its model"
        for number in range(-1, args.rounds):
            for count in args.concurrency:
                jobs, _, file = requests.make(count, 100 * (number + 1) + count)
                for name in list(runs):
                    if name.startswith(SEQUENTIAL) and count > min(args.concurrency):
                        continue  # one after the other takes as long for each, however many there are
                    where = f"{section}, round {number + 1} of {args.rounds}, {count} at a time, {name}"
                    try:
                        cost = runs[name](jobs, file)
                    except Ended as ended:
                        found.left_out[name] = str(ended).partition("\n")[0]
                        say(f"{where}: {ended}")
                        del runs[name]
                        continue
                    if number >= 0:
                        found.costs.setdefault((name, count), []).append(cost)
                    say(f"{where}: {cost.cpu:.2f} CPU s" + (" (not counted)" if number < 0 else ""))
    return found


def _start(name: str, kind: str, folder: Path, args: argparse.Namespace, resources: contextlib.ExitStack) -> Run | None:
    """How the engine is run, once it starts; None where it is not to be had."""
    engine, _, dtype = name.rpartition("-")
    if engine == "triptych":
        ours = resources.enter_context(Ours(args.checkpoints / f"{kind}-{dtype}", dtype))
        return lambda jobs, file: ours.run(jobs)
    command = _command(engine, dtype, kind, args)
    if not command:
        return None
    other = resources.enter_context(Incumbent(command, folder / f"{name}.log"))
    return lambda jobs, file: other.run(file)


def _command(engine: str, dtype: str, kind: str, args: argparse.Namespace) -> list[str]:
    model, most = args.checkpoints / f"{kind}-{dtype}", str(max(args.concurrency))
    if engine in ("padded", SEQUENTIAL):
        return [sys.executable, "-m", "bench.incumbents.padded", str(model), dtype, "batch" if engine == "padded" else engine]
    python = {"vllm": args.vllm, "openvino": args.openvino, "llama.cpp": args.llama_cpp}[engine]
    if engine == "openvino":
        model = args.checkpoints / f"openvino-{kind}"
    elif engine == "llama.cpp":
        model = args.checkpoints / f"{kind}-{dtype}.gguf"
    if not python or not model.exists():
        return []
    module = {"vllm": "vllm_cpu", "openvino": "openvino", "llama.cpp": "llama_cpp"}[engine]
    if engine != "llama.cpp":
        return [python, "-m", f"bench.incumbents.{module}", str(model), dtype, most]
    projector = [str(args.checkpoints / "vision-projector.gguf")] if kind == "vision" else []
    return [python, "-m", f"bench.incumbents.{module}", str(model), most, *projector]


def rows_of(section: str, found: Found) -> list[dict[str, Any]]:
    """A row for each number of requests at a time and engine that was there to the end, medians of the rounds."""
    measured = {key: costs for key, costs in found.costs.items() if key[0] not in found.left_out}
    rows = []
    for (name, count), costs in sorted(measured.items(), key=lambda item: item[0][1]):
        cost = median(costs)
        rows.append(
            {
                "at a time": count,
                "engine": name,
                "tokens/CPU s": round(count * SIZES[section].max_tokens / cost.cpu, 1),
                "requests/CPU s": round(count / cost.cpu, 2),
                "tokens/s": round(count * SIZES[section].max_tokens / cost.wall, 1),
                "CPU s, least to most": f"{min(c.cpu for c in costs):.2f} to {max(c.cpu for c in costs):.2f}",
                "of services": ", ".join(f"{part} {seconds:.2f}" for part, seconds in cost.parts.items()),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = new_parser("bench.compare", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--checkpoints", type=Path, required=True, help="folder that bench.checkpoints wrote")
    add("--sections", type=listed(str, list(SIZES)), default=list(SIZES), help="text, image (default both)")
    add("--engines", type=listed(str, ENGINES), default=list(ENGINES), help=f"of {', '.join(ENGINES)} (default all)")
    add("--concurrency", type=listed(int), default=[1, 8, 16], help="requests at a time (default 1,8,16)")
    add("--rounds", type=int, default=5, help="rounds; medians count (default %(default)s)")
    cores = sorted(os.sched_getaffinity(0))
    add("--cores", type=listed(int), default=cores[:1], help="of each engine; the client takes another (default the first)")
    for name in ("vllm", "openvino", "llama-cpp"):
        add(f"--{name}", default="", metavar="PYTHON", help=f"python of a virtual environment with {name}")
    args = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {}
    for section in args.sections:
        found = measure(section, args)
        results[section] = rows_of(section, found)
        results[f"{section}: left out"] = [{"engine": name, "why": why} for name, why in found.left_out.items()]
    report("bench.compare", args.json, results, medians_of=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
