"""Triptych beside other engines, on the same checkpoints, requests and cores, in one run: ``python -m bench.compare``.

Each engine answers the same greedy requests, so many at a time, on one thread; rounds are interleaved. Of ours the CPU seconds of
all services count (gateway, encoder and language model, over gRPC), of the others those of their one process, which is given
token ids and opened pictures by a function call: their servers are not measured. `make bench-incumbents` prepares what it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.arrivals import closed_loop
from bench.incumbents.client import Incumbent
from bench.load import Ask, write_load
from bench.measure import Cost, host_facts, median, table, write_figures
from bench.processes import Meter, services_under
from bench.targets import Grpc
from bench.workloads import Job, Sizes, one_image, text_only
from scripts.local_stack import local_stack
from services.models.checkpoint import open_checkpoint
from services.models.layout import PromptLayout, Turn

EXAMPLES = """examples:
  python -m bench.compare --checkpoints .bench --sections text --engines triptych-float32,padded-float32
  python -m bench.compare --checkpoints .bench --vllm .venv-vllm/bin/python --openvino .venv-openvino/bin/python --json f.json
"""
ENGINES = {
    "triptych-float32": "", "triptych-bfloat16": "",
    "vllm-float32": "vllm", "vllm-bfloat16": "vllm",
    "one-by-one-float32": "ours", "padded-float32": "ours", "padded-bfloat16": "ours",
    "openvino-f32": "openvino", "openvino-bf16": "openvino",
    "llama.cpp-F32": "llama_cpp",
}  # fmt: skip
SIZES = {"text": Sizes(words=90, max_tokens=64), "image": Sizes(max_tokens=32)}


class Requests:
    """What is asked in one section, as jobs for ours and as files for the others.

    Args:
        section: "text" or "image".
        checkpoint: whose tokenizer and template count.
        folder: where files go.
    """

    def __init__(self, section: str, checkpoint: Path, folder: Path) -> None:
        self.section, self._folder, self._sizes = section, folder, SIZES[section]
        self._layout = PromptLayout(open_checkpoint(str(checkpoint)))

    def make(self, count: int, seed: int) -> tuple[list[Job], Path]:
        """Different ones for every seed, so that no cache has them."""
        rng = random.Random(f"{self.section} {seed}")
        jobs = [(text_only if self.section == "text" else one_image)(rng, self._sizes) for _ in range(count)]
        file = self._folder / f"{self.section}-{seed}.json"
        write_load(file, [self._ask(job, seed, i) for i, job in enumerate(jobs)])
        return jobs, file

    def _ask(self, job: Job, seed: int, index: int) -> Ask:
        """The job's prompt as the gateway would lay it out, but with one placeholder for a picture."""
        words = job.turns[0][-1]["text"]
        if self.section == "text":
            return Ask(self._layout.lay_out([Turn("user", (words,))]).token_ids, job.max_tokens, text=words)
        picture = self._folder / f"{seed}-{index}.jpg"
        picture.write_bytes(base64.b64decode(job.turns[0][0]["image_url"]["url"].partition(",")[2]))
        text = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{words}<|im_end|>\n<|im_start|>assistant\n"
        return Ask(self._layout.tokenizer.fast.encode(text, add_special_tokens=False).ids, job.max_tokens, str(picture), text)


class Ours:
    """The stack of three services; a context manager."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self._resources = contextlib.ExitStack()
        stack = self._resources.enter_context(local_stack("--model", str(checkpoint), "--dtype", dtype, quiet=True))
        self._meter_of = services_under(stack.process.pid)
        self._address = stack.address

    def run(self, jobs: Sequence[Job]) -> Cost:
        """All at once."""
        meter, started = Meter(self._meter_of), time.perf_counter()

        async def load() -> None:
            target = Grpc(self._address)
            records = await closed_loop(target, jobs, len(jobs))
            await target.close()
            assert all(record.outcome == "answered" for record in records), {record.outcome for record in records}

        asyncio.run(load())
        return Cost(meter.read()["cpu_s"]["all"], time.perf_counter() - started)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


def measure(section: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine and number of requests at a time."""
    kind = "text" if section == "text" else "vision"
    most = max(args.concurrency)
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        requests = Requests(section, args.checkpoints / f"{kind}-float32", folder)
        runs: dict[str, Callable[[list[Job], Path], Cost]] = {}
        for name in args.engines:
            _say(f"starting {name}")
            engine, _, dtype = name.rpartition("-")
            if engine == "triptych":
                ours = resources.enter_context(Ours(args.checkpoints / f"{kind}-{dtype}", dtype))
                runs[name] = lambda jobs, file, ours=ours: ours.run(jobs)  # type: ignore[misc]
            elif command := _command(engine, dtype, kind, most, args):
                other = resources.enter_context(Incumbent(command))
                runs[name] = lambda jobs, file, other=other: other.run(file)  # type: ignore[misc]
            else:
                _say(f"left out: {name}, whose python or model is not here")
        costs: dict[tuple[str, int], list[Cost]] = {}
        for number in range(-1, args.rounds):  # the first is not counted
            for count in args.concurrency:
                jobs, file = requests.make(count, 100 * (number + 1) + count)
                for name, run in runs.items():
                    cost = run(jobs, file)
                    if number >= 0:
                        costs.setdefault((name, count), []).append(cost)
                    _say(f"round {number + 1} of {args.rounds}: {section}, {count} at a time, {name}: {cost.cpu:.2f} CPU s")
    return [_row(section, name, count, found) for (name, count), found in sorted(costs.items(), key=lambda item: item[0][1])]


def _command(engine: str, dtype: str, kind: str, most: int, args: argparse.Namespace) -> list[str]:
    """How an incumbent is started; nothing where it is not to be had."""
    model = args.checkpoints / f"{kind}-{dtype}"
    if engine in ("padded", "one-by-one"):
        return [sys.executable, "-m", "bench.incumbents.padded", str(model), dtype, "batch" if engine == "padded" else engine]
    python = {"vllm": args.vllm, "openvino": args.openvino, "llama.cpp": args.llama_cpp}[engine]
    if engine == "openvino":
        model = args.checkpoints / f"openvino-{kind}"
    elif engine == "llama.cpp":
        model = args.checkpoints / f"{kind}-{dtype}.gguf"
    if not python or not model.exists():
        return []
    if engine == "llama.cpp":
        projector = [str(file) for file in [args.checkpoints / f"{kind}-projector.gguf"] if file.exists()]
        return [python, "-m", "bench.incumbents.llama_cpp", str(model), str(most), *projector]
    module = {"vllm": "vllm_cpu", "openvino": "openvino"}[engine]
    return [python, "-m", f"bench.incumbents.{module}", str(model), dtype, str(most)]


def _row(section: str, name: str, count: int, found: list[Cost]) -> dict[str, Any]:
    cost = median(found)
    tokens = count * SIZES[section].max_tokens
    return {
        "section": section,
        "at a time": count,
        "engine": name,
        "tokens/CPU s": round(tokens / cost.cpu, 1),
        "requests/CPU s": round(count / cost.cpu, 2),
        "tokens/s": round(tokens / cost.wall, 1),
        "CPU s, least to most": f"{min(c.cpu for c in found):.2f} to {max(c.cpu for c in found):.2f}",
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = argparse.ArgumentParser(
        prog="bench.compare", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument

    def words(text: str) -> list[str]:
        return text.split(",")

    add("--checkpoints", type=Path, required=True, help="folder that bench.checkpoints wrote")
    add("--sections", type=words, default=["text", "image"], help="text, image (default both)")
    add("--engines", type=words, default=list(ENGINES), help=f"of {', '.join(ENGINES)} (default all that are here)")
    add("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 16], help="(default 1,8,16)")
    add("--rounds", type=int, default=5, help="rounds; medians count (default %(default)s)")
    for name in ("vllm", "openvino", "llama-cpp"):
        add(f"--{name}", default="", metavar="PYTHON", help=f"python of a virtual environment with {name}")
    add("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"no engine {min(unknown)!r}; there are {', '.join(ENGINES)}")
    rows = [row for section in args.sections for row in measure(section, args)]
    print(table(rows))
    if args.json:
        write_figures(args.json, host_facts("bench.compare"), rows=rows, medians_of=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
