"""The gateway: under more load than its backends can bear, and counting a picture. ``python -m bench.gateway``.

For load, a real gateway process stands between this load generator and backends that take fixed times
(:mod:`bench.fake_backends`), all in processes of their own. Arrivals are open-loop: Poisson, seeded, sent whether or not earlier
ones were answered. An answer counts (goodput) where it is complete within its deadline.

Sections:
    overload: answers in time at 2, 5 and 10 times the capacity, and how fast refusals come.
    fairness: how long texts wait for their first token among videos, at twice the capacity.
    counting: CPU time from a picture's bytes to token ids, by its header and by transformers' processor (:mod:`bench.counting`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.command import new_parser, report
from services.common.channel import open_channel
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc

MEDIA = Path(__file__).resolve().parents[1] / "tests/data/media"
ANSWER_TOKENS = 16
TARGETS = {2: 0.95, 5: 0.90, 10: 0.80}
SECTIONS = ("overload", "fairness", "counting")
EXAMPLES = """examples:
  python -m bench.gateway
  python -m bench.gateway --sections fairness --seconds 60 --json figures/gateway.json
"""


@dataclass(frozen=True)
class Outcome:
    """One request: its kind, its status, seconds to the first token and to the end, and whether its answer was complete
    while it was measured."""

    kind: str
    code: grpc.StatusCode
    first: float
    seconds: float
    counts: bool


class Requests:
    """Requests of a mix of kinds, no two with the same media."""

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        self._shares, self._rng, self._numbers = shares, random.Random(seed), itertools.count(seed << 32)
        self._picture = (MEDIA / "photo_flower_turned.jpg").read_bytes()
        self._video = (MEDIA / "band.mp4").read_bytes()

    def next(self) -> tuple[str, gateway_pb2.ChatRequest]:
        """A kind and a request of it."""
        (kind,) = self._rng.choices(list(self._shares), list(self._shares.values()))
        mark = struct.pack(">Q", next(self._numbers))
        parts = [gateway_pb2.Part(text="What is to be seen here, and what is not? Answer in a sentence.")]
        if kind == "picture":  # what stands behind a JPEG's end is no part of the picture
            parts.append(gateway_pb2.Part(image=gateway_pb2.Media(data=self._picture + mark)))
        if kind == "video":  # nor is what stands in a free box
            box = struct.pack(">I4s", 16, b"free") + mark
            parts.append(gateway_pb2.Part(video=gateway_pb2.Media(data=self._video + box)))
        message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)
        return kind, gateway_pb2.ChatRequest(messages=[message], sampling=sampling_pb2.SamplingParams(max_tokens=ANSWER_TOKENS))


class Client:
    """Sends requests and keeps what came of them."""

    def __init__(self, stub: Any, requests: Requests, deadline: float) -> None:
        self._stub, self._requests, self._deadline = stub, requests, deadline
        self.outcomes: list[Outcome] = []
        self.begin, self.end = 0.0, float("inf")

    async def send(self) -> None:
        """One request, to its end."""
        kind, request = self._requests.next()
        started, first, code = time.perf_counter(), 0.0, grpc.StatusCode.OK
        try:
            async for response in self._stub.Chat(request, timeout=self._deadline):
                if response.HasField("delta") and not first:
                    first = time.perf_counter() - started
        except grpc.aio.AioRpcError as error:
            code = error.code()
        ended = time.perf_counter()
        self.outcomes.append(
            Outcome(kind, code, first, ended - started, counts=code is grpc.StatusCode.OK and self.begin <= ended < self.end)
        )

    async def keep_busy(self, clients: int, seconds: float) -> float:
        """So many requests at any time; answers per second in the last two thirds, when all places are taken."""
        self.begin = time.perf_counter() + seconds / 3
        self.end = self.begin + seconds * 2 / 3

        async def worker() -> None:
            while time.perf_counter() < self.end:
                await self.send()

        await asyncio.gather(*(worker() for _ in range(clients)))
        if not self.answers:
            raise SystemExit(f"bench.gateway: error: nothing was answered within {seconds} s; give it more --seconds")
        return self.answers / (self.end - self.begin)

    @property
    def answers(self) -> int:
        """Complete ones."""
        return sum(outcome.counts for outcome in self.outcomes)

    async def arrive(self, rate: float, seconds: float, seed: int) -> None:
        """Open-loop arrivals."""
        rng, tasks = random.Random(seed), []
        due = time.perf_counter()
        self.end = due + seconds
        while (due := due + rng.expovariate(rate)) < self.end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send()))
        await asyncio.gather(*tasks)


@asynccontextmanager
async def gateway(llm: Sequence[str], encoder: Sequence[str], flags: Sequence[str]) -> AsyncIterator[Any]:
    """The three processes; yields a stub of the gateway."""
    processes: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: str, find: Callable[[str], str | None]) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )
        processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if address := find(line):
                return address
        raise RuntimeError(f"{module} ended with {process.wait()}")

    def ready(line: str) -> str | None:
        return line.split()[1] if line.startswith("ready ") else None

    def serving(line: str) -> str | None:
        return line.split('"address": "')[1].split('"')[0] if '"event": "serving"' in line else None

    try:
        backends = (
            start("bench.fake_backends", "llm", *llm, find=ready),
            start("bench.fake_backends", "encoder", *encoder, find=ready),
        )
        options = ["--port", "0", "--llm", backends[0], "--encoder", backends[1], "--log-level", "info", *flags]
        address = await asyncio.to_thread(start, "services.gateway", *options, find=serving)
        drain = asyncio.create_task(asyncio.to_thread(processes[-1].stdout.read))  # type: ignore[union-attr]
        channel = open_channel(address)
        await asyncio.wait_for(channel.channel_ready(), 10)
        yield gateway_pb2_grpc.ChatServiceStub(channel)
        await channel.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    await drain


async def overload(seconds: float, seed: int, loads: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each multiple of the capacity: two places of 0.2 s, seven texts to three pictures, a deadline of 2 s."""
    shares, deadline, rows = {"text": 0.7, "picture": 0.3}, 2.0, []
    async with gateway(["--places", "2"], ["--seconds", "0.1"], []) as stub:
        await Client(stub, Requests(shares, seed), 10).keep_busy(8, min(3, seconds))  # warm
        peak = await Client(stub, Requests(shares, seed + 1), 10).keep_busy(24, seconds)
        for factor in loads:
            target = TARGETS.get(factor, 0.0)
            client = Client(stub, Requests(shares, seed + 1 + factor), deadline)
            await client.arrive(factor * peak, seconds, seed + factor)
            goodput = client.answers / seconds
            codes = Counter(outcome.code.name for outcome in client.outcomes)
            refusals = [o.seconds for o in client.outcomes if o.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
            rows.append(
                {
                    "load": f"{factor}x",
                    "offered/s": round(len(client.outcomes) / seconds, 1),
                    "in time/s": round(goodput, 2),
                    "peak/s": round(peak, 2),
                    "of peak": f"{goodput / peak:.0%}",
                    "target": f"{target:.0%}",
                    "refused": codes["RESOURCE_EXHAUSTED"],
                    "refusal p50 ms": round(1000 * quantile(refusals, 0.5), 1),
                    "refusal p99 ms": round(1000 * quantile(refusals, 0.99), 1),
                    "too late": codes["DEADLINE_EXCEEDED"],
                    "other": len(client.outcomes) - sum(codes[c] for c in ("OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


async def fairness(seconds: float, seed: int, loads: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each bottleneck: nine videos to a text at the least of the loads, and the same texts alone."""
    load, rows = min(loads), []
    for name, video, encode in (("encoder", ("0.1", "0.1"), 0.1), ("language model", ("0.3", "2.9"), 0.02)):
        media = ["--places", "32", "--media", *video]
        async with gateway(media, ["--seconds", str(encode)], ["--profile", "video"]) as stub:
            shares = {"text": 0.1, "video": 0.9}
            await Client(stub, Requests(shares, seed), 20).keep_busy(8, min(3, seconds))  # warm
            capacity = await Client(stub, Requests(shares, seed + 1), 20).keep_busy(32, seconds / 2)
            alone, among = Client(stub, Requests({"text": 1}, seed + 2), 10), Client(stub, Requests(shares, seed + 3), 10)
            await alone.arrive(0.1 * load * capacity, seconds, seed)
            await among.arrive(load * capacity, seconds, seed)
            texts = [o for o in among.outcomes if o.kind == "text"]
            first, before = ([o.first for o in found if o.first] for found in (texts, alone.outcomes))
            videos = [outcome for outcome in among.outcomes if outcome.kind == "video"]
            rows.append(
                {
                    "bottleneck": name,
                    "capacity/s": round(capacity, 2),
                    "offered/s": round(len(among.outcomes) / seconds, 2),
                    "texts": f"{len(first)} of {len(texts)}",
                    "videos": f"{sum(v.counts for v in videos)} of {len(videos)}",
                    "alone p50 ms": round(1000 * quantile(before, 0.5)),
                    "alone p99 ms": round(1000 * quantile(before, 0.99)),
                    "among p50 ms": round(1000 * quantile(first, 0.5)),
                    "among p99 ms": round(1000 * quantile(first, 0.99)),
                    "p99 / alone": round(quantile(first, 0.99) / quantile(before, 0.99), 2),
                    "target": 2.0,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def counting() -> list[dict[str, Any]]:
    """See :mod:`bench.counting`. It brings torch along, which a process that measures other sections' delays has no use for."""
    from bench.counting import counting

    return counting()


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = new_parser("bench.gateway", __doc__, EXAMPLES)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of every load (default %(default)s)")
    parser.add_argument("--loads", type=int, nargs="+", default=list(TARGETS), help="multiples of the capacity (default 2 5 10)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and kinds (default %(default)s)")
    args = parser.parse_args(argv)
    load = args.seconds, args.seed, args.loads
    sections = {
        "overload": lambda: uvloop.run(overload(*load)),
        "fairness": lambda: uvloop.run(fairness(*load)),
        "counting": counting,
    }
    figures = {name: sections[name]() for name in args.sections}
    report("bench.gateway", args.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
