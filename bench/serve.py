"""Load on a running server, over OpenAI's HTTP or Triptych's gRPC: ``python -m bench.serve``.

Closed loops (``--concurrency``: so many requests at a time) and open ones (``--rate``: so many a second, whatever the server
does) of seeded workloads. Reports time to the first token, time between tokens, whole requests, goodput under stated targets,
requests refused, CPU seconds of each service and peak memory. A stack of our own is started unless an address is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.arrivals import Record, closed_loop, open_loop, summary
from bench.command import listed, new_parser, report, say
from bench.counters import read_work
from bench.measure import markdown
from bench.plots import bars
from bench.processes import Meter, backends_under, services_under
from bench.targets import Grpc, Http, Target
from bench.workloads import COLD, WARM, WORKLOADS, Job, Sizes, make_jobs
from scripts.local_stack import local_stack

EXAMPLES = """examples:
  python -m bench.serve --workload text,image --concurrency 1,8,16
  python -m bench.serve --workload mixed --rate 0.5,1,2 --requests 60 --model ./omni --json figures/mixed.json --plots figures
  python -m bench.serve --workload text --rate 1 --beside image:4
  python -m bench.serve --workload repeated --concurrency 1 --rounds 5 --model .bench/checkpoints/vision-float32
  python -m bench.serve --base-url http://127.0.0.1:8000/v1 --served-model m --workload image --concurrency 8 --pid vllm=4711
"""


@dataclass(frozen=True)
class Server:
    """What is under load.

    Attributes:
        address: of its HTTP or gRPC.
        services: its processes by name, as far as they are known.
        backends: addresses of the encoder and the language model of a stack of our own, whose counters are read.
    """

    address: str
    services: Mapping[str, int]
    backends: Mapping[str, str]


@dataclass(frozen=True)
class Point:
    """One load: a workload, and how it arrives."""

    workload: str
    concurrency: int = 0
    rate: float = 0.0

    @property
    def arrivals(self) -> str:
        """In words."""
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} a second"


async def run(target: Target, point: Point, jobs: Sequence[Job], seed: int, beside: tuple[Sequence[Job], float] | None) -> Run:
    """One load, with another one beside it for as long as it takes."""
    started = time.perf_counter()
    other = asyncio.create_task(open_loop(target, beside[0], beside[1], seed + 1)) if beside else None
    if point.concurrency:
        records = await closed_loop(target, jobs, point.concurrency)
    else:
        records = await open_loop(target, jobs, point.rate, seed)
    seconds = time.perf_counter() - started
    if other is not None:
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other
    return Run(records, seconds)


@dataclass(frozen=True)
class Run:
    """What was written down, and how long it took."""

    records: list[Record]
    seconds: float


def measure(args: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    """A row for each load: of several rounds the one whose throughput is the median."""
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    beside = None
    if args.beside:
        workload, _, rate = args.beside.partition(":")
        beside = make_jobs(workload, 4 * args.requests, args.seed + 1, sizes), float(rate)
    points = [Point(w, concurrency=c) for w in args.workload for c in args.concurrency]
    points += [Point(w, rate=r) for w in args.workload for r in args.rate]
    rounds: dict[Point, list[dict[str, Any]]] = {point: [] for point in points}

    async def all_rounds() -> None:
        target: Target = Http(server.address, args.served_model) if server.address.startswith("http") else Grpc(server.address)
        warm = make_jobs(args.workload[0], 2, args.seed - 1, sizes)
        await closed_loop(target, warm, 1)
        for number in range(args.rounds):
            for point in points:  # interleaved: a noisy neighbour meets all of them
                seed = args.seed + (0 if args.warm_cache else 1000 * number + points.index(point))
                jobs = make_jobs(point.workload, args.requests, seed, sizes)
                before = read_work(server.backends) if server.backends else None
                meter = Meter(server.services)
                done = await run(target, point, jobs, args.seed + number, beside)
                row = {"workload": point.workload, "arrivals": point.arrivals, "seconds": round(done.seconds, 2)}
                row |= summary(done.records, done.seconds, args.ttft_target, args.token_target) | meter.read()
                row["work"] = read_work(server.backends).since(before) if before else {}
                rounds[point].append(row)
                where = f"round {number + 1} of {args.rounds}: {point.workload}, {point.arrivals}"
                say(f"{where}: {row['requests_per_s']} requests/s")
        await target.close()

    asyncio.run(all_rounds())
    return [_median_row(found) for found in rounds.values()]


def _median_row(found: list[dict[str, Any]]) -> dict[str, Any]:
    middle = statistics.median_low(row["requests_per_s"] for row in found)
    row = next(row for row in found if row["requests_per_s"] == middle)
    of_rounds = {"requests_per_s_of_rounds": [row["requests_per_s"] for row in found]}
    if ratios := [ratio for row in found if (ratio := warm_to_cold(row)) is not None]:
        of_rounds["warm_to_cold_of_rounds"] = ratios
    return row | {"rounds": len(found), **of_rounds}


def warm_to_cold(row: Mapping[str, Any]) -> float | None:
    """Median time to the first token about pictures that came before, of that about new ones; None of other workloads."""
    kinds = row["ttft_ms_by_kind"]
    return round(kinds[WARM]["p50"] / kinds[COLD]["p50"], 3) if WARM in kinds and COLD in kinds else None


def repeated(row: Mapping[str, Any]) -> dict[str, Any]:
    """What caches saved in a load of repeated pictures."""
    kinds, work = row["ttft_ms_by_kind"], row["work"]
    return {
        "arrivals": row["arrivals"],
        "pictures asked about": row["requests"],
        "encoded": work.get("encoded_items", ""),
        "prompt tokens": work.get("prefix_query_tokens", ""),
        "found in the prefix cache": work.get("prefix_hit_tokens", ""),
        "TTFT ms p50, first time": kinds[COLD]["p50"],
        "again": kinds[WARM]["p50"],
        "again / first time": statistics.median(row["warm_to_cold_of_rounds"]),
    }


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that fits on a line."""
    cpu = row["cpu_s"]["all"]
    return {
        "workload": row["workload"],
        "arrivals": row["arrivals"],
        "answered": f"{row['answered']}/{row['requests']}",
        "refused": row["refused"],
        "requests/s": row["requests_per_s"],
        "goodput/s": row["goodput_per_s"],
        "tokens/s": row["tokens_per_s"],
        "tokens/CPU s": round(row["tokens_per_s"] * row["seconds"] / cpu, 1) if cpu else "",
        "requests/CPU s": round(row["answered"] / cpu, 2) if cpu else "",
        "TTFT ms p50/p90/p99": "/".join(f"{v:.0f}" for v in row["ttft_ms"].values()),
        "between tokens ms": "/".join(f"{v:.0f}" for v in row["inter_token_ms"].values()),
        "whole ms": "/".join(f"{v:.0f}" for v in row["total_ms"].values()),
        "CPU s": " ".join(f"{name} {seconds}" for name, seconds in row["cpu_s"].items() if name != "all"),
        "peak MiB": " ".join(f"{name} {most:.0f}" for name, most in row["peak_mib"].items()),
    }


def plot(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Percentiles of the time to the first token and between tokens, load by load, one picture each."""
    labels = [f"{row['workload']}\n{row['arrivals']}" for row in rows]
    for name, title in (("ttft_ms", "time to first token, ms"), ("inter_token_ms", "time between tokens, ms")):
        series = {cut: [row[name].get(cut, float("nan")) for row in rows] for cut in ("p50", "p90", "p99")}
        bars(folder / f"{name}.png", title, labels, series)


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[Server]:
    """The one that was named, or a stack of our own."""
    if args.base_url or args.grpc:
        pids = {name: int(pid) for name, _, pid in (p.partition("=") for p in args.pid)}
        yield Server(args.base_url or args.grpc, pids, {})
        return
    flags = [*(["--model", args.model] if args.model else []), *args.flag]
    with local_stack(*flags, quiet=True) as stack:
        address = f"http://{stack.http_address}/v1" if args.door == "http" else stack.address
        yield Server(address, services_under(stack.process.pid), backends_under(stack.process.pid))


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json``, ``--markdown`` and ``--plots`` write too."""
    parser = new_parser("bench.serve", __doc__, EXAMPLES)
    add = parser.add_argument
    add(
        "--workload",
        type=listed(str, list(WORKLOADS)),
        default=["text"],
        help=f"{', '.join(WORKLOADS)} (default text)",
    )
    add("--concurrency", type=listed(int), default=[], help="closed loops: requests at a time, several by commas")
    add("--rate", type=listed(float), default=[], help="open loops: requests a second, several by commas")
    add("--beside", default="", metavar="WORKLOAD:RATE", help="another load that runs meanwhile and is not reported")
    add("--requests", type=int, default=32, help="conversations of a load (default %(default)s)")
    add("--rounds", type=int, default=1, help="rounds; the one with the median throughput counts (default %(default)s)")
    add("--warm-cache", action="store_true", help="the same requests in every round instead of others")
    add("--seed", type=int, default=1, help="of workloads and arrivals (default %(default)s)")
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        add(flag, type=type(field.default), default=field.default, help="size of what is sent or answered (default %(default)s)")
    add("--ttft-target", type=float, default=2.0, help="seconds to the first token that are good (default %(default)s)")
    add("--token-target", type=float, default=0.2, help="seconds from token to token that are good (default %(default)s)")
    add("--model", default="", help="checkpoint for a stack of our own (the embedded one)")
    add("--flag", action="append", default=[], help="for `triptych up`, as in --flag=--dtype --flag=bfloat16")
    add("--door", choices=("http", "grpc"), default="http", help="way into it (default %(default)s)")
    add("--base-url", default="", help="a server that runs already, such as http://127.0.0.1:8000/v1")
    add("--grpc", default="", metavar="HOST:PORT", help="a Triptych gateway that runs already")
    add("--served-model", default="default", help="the model's name there (default %(default)s)")
    add("--pid", action="append", default=[], metavar="NAME=PID", help="its processes, for CPU seconds and memory")
    add("--markdown", type=Path, help="file to write the table to")
    add("--plots", type=Path, help="folder to draw into")
    args = parser.parse_args(argv)
    if not args.concurrency and not args.rate:
        args.concurrency = [8]
    with _server(args) as server:
        rows = measure(args, server)
    lines = [shown(row) for row in rows]
    alone = Point("repeated", concurrency=1).arrivals  # with more, some wait while their picture is still being encoded
    again = [repeated(row) for row in rows if "warm_to_cold_of_rounds" in row and row["arrivals"] == alone]
    report("bench.serve", args.json, {"loads": lines, "repeated pictures": again}, loads=rows)
    if args.markdown:
        args.markdown.write_text(markdown(lines) + "\n")
    if args.plots:
        plot(rows, args.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
