"""What services cost beside the engine: ``python -m bench.overhead``.

The same texts, all at once, through the stack (gateway, encoder and language model, on one core, over gRPC, client not counted)
and through the same engine inside this process, on another core, in turn. Whatever the stack takes more is the gateway, gRPC,
detokenising, streaming and what its threads do to each other. Then what the stack costs while nobody asks anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.command import listed, new_parser, report, say
from bench.load import Ask
from bench.measure import Cost, cost_of, interleave, median
from bench.ours import Ours
from bench.processes import starting_on
from bench.requests import Requests
from bench.stack import Stack, load_runner

EXAMPLES = """examples:
  OMP_NUM_THREADS=1 python -m bench.overhead --checkpoints .bench/checkpoints
  OMP_NUM_THREADS=1 python -m bench.overhead --checkpoints .bench/checkpoints --dtypes float32 --concurrency 1,16 --rounds 7
"""
MOST_SEQUENCES = 64  # in a step, the service's default
TARGET = 0.1


def measure(
    checkpoint: Path, dtype: str, concurrency: list[int], core: int, rounds: int, idle_seconds: float
) -> list[dict[str, Any]]:
    """A row for each number of requests at a time."""
    rows = []
    with contextlib.ExitStack() as resources:
        folder = resources.enter_context(tempfile.TemporaryDirectory())
        with starting_on([core]):
            ours = resources.enter_context(Ours(checkpoint, dtype))
        runner = load_runner(checkpoint, dtype)
        requests = Requests("text", checkpoint, Path(folder))
        idle = ours.idle(idle_seconds)
        for count in concurrency:
            sets = [requests.make(count, 100 * number + count) for number in range(rounds + 1)]
            asked = {"stack": iter(sets), "engine": iter(sets)}
            runs = {
                "stack": lambda asked=asked: ours.run(next(asked["stack"])[0]),
                "engine": lambda asked=asked: cost_of(lambda: _answer(runner, next(asked["engine"])[1])),
            }
            costs = interleave(runs, rounds)
            rows.append({"dtype": dtype, "at a time": count} | compared(costs["stack"], costs["engine"]) | of_idle(idle))
    return rows


def compared(stack: list[Cost], engine: list[Cost]) -> dict[str, Any]:
    """CPU seconds of both, and the share of the stack's that the engine by itself does without."""
    whole, alone = median(stack), median(engine)
    return {
        "stack, CPU s": round(whole.cpu, 2),
        **{f"{name}, CPU s": round(seconds, 2) for name, seconds in whole.parts.items()},
        "engine in process, CPU s": round(alone.cpu, 2),
        "overhead": round(1 - alone.cpu / whole.cpu, 3),
        "target": TARGET,
    }


def of_idle(cost: Cost) -> dict[str, Any]:
    """CPU milliseconds in a second of nothing."""
    return {"idle, CPU ms/s": ", ".join(f"{name} {1e3 * seconds / cost.wall:.1f}" for name, seconds in cost.parts.items())}


def _answer(runner: Any, asks: list[Ask]) -> None:
    """All at once, until every answer is complete."""
    stack = Stack(runner, MOST_SEQUENCES)
    for ask in asks:
        stack.submit(ask)
    while stack.step():
        pass
    assert [len(stack.tokens(i)) for i in range(len(asks))] == [ask.new_tokens for ask in asks]
    stack.close()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = new_parser("bench.overhead", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--checkpoints", type=Path, required=True, help="folder that bench.checkpoints wrote")
    add("--dtypes", type=listed(str, ("float32", "bfloat16")), default=["float32", "bfloat16"], help="default: both")
    add("--concurrency", type=listed(int), default=[16], help="requests at a time (default 16)")
    add("--rounds", type=int, default=5, help="rounds; medians count (default %(default)s)")
    add("--idle-seconds", type=float, default=10.0, help="how long idleness is watched (default %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows, core = [], min(os.sched_getaffinity(0))
    for dtype in args.dtypes:
        say(f"starting a stack in {dtype}")
        rows += measure(args.checkpoints / f"text-{dtype}", dtype, args.concurrency, core, args.rounds, args.idle_seconds)
    report("bench.overhead", args.json, {"overhead": rows}, medians_of=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
