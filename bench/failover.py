"""What clients notice when a server is killed: text while an encoder is away, and a stream whose language model dies.

Two encoders, two language models and a gateway as processes, on a tiny checkpoint. Text and picture requests arrive at random
times (open loop, seeded) in rounds: one with all servers, one that begins with the death of an encoder; in between a language
model is killed in the middle of a stream. What was killed is started again before the next round.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from PIL import Image

from bench.measure import host_facts, table, write_figures
from scripts.local_fleet import LocalFleet, local_fleet
from scripts.make_checkpoint import main as make_checkpoint
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

EXAMPLES = """examples:
  python -m bench.failover
  python -m bench.failover --rounds 5 --seconds 60 --text-rate 20
"""
TEXT_TOKENS, STREAM_TOKENS = 8, 600


@dataclass
class Round:
    """Seconds to the first token of text and to the end of pictures' answers, and what failed."""

    text: list[float] = field(default_factory=list)
    pictures: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, other: Round) -> None:
        """Take in another round's figures."""
        self.text += other.text
        self.pictures += other.pictures
        self.failed += other.failed


class Load:
    """Arrivals at one gateway."""

    def __init__(self, stub: Any, text_rate: float, picture_rate: float, seed: int) -> None:
        self._stub, self._rates, self._random = stub, (text_rate, picture_rate), random.Random(seed)
        self._pictures = 0

    async def run(self, seconds: float) -> Round:
        """Ask for so long; returns when everything is answered."""
        found = Round()
        async with asyncio.TaskGroup() as group:
            end = time.monotonic() + seconds
            while (now := time.monotonic()) < end:
                text, pictures = self._rates
                picture = self._random.random() < pictures / (text + pictures)
                group.create_task(self._ask(self._picture() if picture else _text(self._random), picture, found))
                await asyncio.sleep(min(self._random.expovariate(text + pictures), max(0.0, end - now)))
        return found

    async def _ask(self, request: gateway_pb2.ChatRequest, picture: bool, found: Round) -> None:
        started, first = time.monotonic(), 0.0
        try:
            async for event in self._stub.Chat(request, timeout=60):
                if event.HasField("delta") and not first:
                    first = time.monotonic() - started
        except grpc.aio.AioRpcError as error:
            print(f"failed: {error.code().name} {error.details()}", file=sys.stderr, flush=True)
            found.failed += 1
            return
        if picture:
            found.pictures.append(time.monotonic() - started)
        else:
            found.text.append(first)

    def _picture(self) -> gateway_pb2.ChatRequest:
        """One that nobody has seen."""
        self._pictures += 1
        file = io.BytesIO()
        Image.new("RGB", (112, 84), (self._pictures % 256, self._pictures // 256 % 256, 90)).save(file, "PNG")
        return _asking(gateway_pb2.Part(image=gateway_pb2.Media(data=file.getvalue())))


def _text(chance: random.Random) -> gateway_pb2.ChatRequest:
    return _asking(gateway_pb2.Part(text=" ".join(chance.choice(("red", "blue", "old", "new")) for _ in range(20))))


def _asking(part: gateway_pb2.Part, tokens: int = TEXT_TOKENS) -> gateway_pb2.ChatRequest:
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[part])
    sampling = sampling_pb2.SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0)
    return gateway_pb2.ChatRequest(messages=[message], sampling=sampling)


async def _pause_of_a_stream(fleet: LocalFleet, stub: Any) -> float:
    """Kill the language model behind a stream; the longest time without a token."""
    pause = last = 0.0
    killed = ""
    async for event in stub.Chat(_asking(gateway_pb2.Part(text="tell me a story"), STREAM_TOKENS), timeout=60):
        now = time.monotonic()
        if killed and last:
            pause = max(pause, now - last)
        last = now
        if event.HasField("delta") and not killed:
            killed = await _busy(fleet)
            fleet.members["llm"][killed].kill()
    await asyncio.to_thread(fleet.end_of, "llm", killed)
    await asyncio.to_thread(fleet.restart, "llm", killed)
    return pause


async def _busy(fleet: LocalFleet) -> str:
    for address in fleet.members["llm"]:
        async with grpc.aio.insecure_channel(address) as channel:
            load = await llm_pb2_grpc.LlmServiceStub(channel).GetLoad(llm_pb2.GetLoadRequest(), timeout=5)
            if load.running_sequences:
                return address
    raise AssertionError("no language model runs")


async def measure(fleet: LocalFleet, rounds: int, seconds: float, rates: tuple[float, float]) -> tuple[Round, Round, list[float]]:
    """All rounds with every server, all with an encoder killed, and the pauses of streams."""
    whole, without, pauses = Round(), Round(), []
    async with grpc.aio.insecure_channel(fleet.address) as channel:
        stub: Any = gateway_pb2_grpc.ChatServiceStub(channel)
        load = Load(stub, *rates, seed=1)
        await load.run(5)  # unmeasured: connections and caches
        for number in range(1, rounds + 1):
            whole.add(await load.run(seconds))
            victim = list(fleet.members["encoder"])[number % 2]
            running = asyncio.create_task(load.run(seconds))
            fleet.members["encoder"][victim].kill()
            without.add(await running)
            await asyncio.to_thread(fleet.restart, "encoder", victim)
            pauses.append(await _pause_of_a_stream(fleet, stub))
            print(f"round {number} of {rounds}: pause {pauses[-1]:.2f} s", file=sys.stderr, flush=True)
    return whole, without, pauses


def _rows(rounds: dict[str, Round]) -> list[dict[str, Any]]:
    return [
        {
            "servers": name,
            "text requests": len(found.text),
            "text p50 ms": round(1000 * statistics.median(found.text), 1),
            "text p99 ms": round(1000 * _p99(found.text), 1),
            "picture requests": len(found.pictures),
            "picture p99 ms": round(1000 * _p99(found.pictures), 1),
            "failed": found.failed,
        }
        for name, found in rounds.items()
    ]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = argparse.ArgumentParser(
        prog="bench.failover", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="rounds of each kind (default %(default)s)")
    add("--seconds", type=float, default=30.0, help="length of a round (default %(default)s)")
    add("--text-rate", type=float, default=10.0, help="text requests a second (default %(default)s)")
    add("--picture-rate", type=float, default=2.0, help="picture requests a second (default %(default)s)")
    add("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_checkpoint(["--family", "qwen2_vl", "--out", str(model), "--seed", "11"])
        with local_fleet(str(model), Path(folder), "--dtype", "float32") as fleet:
            rates = (args.text_rate, args.picture_rate)
            whole, without, pauses = asyncio.run(measure(fleet, args.rounds, args.seconds, rates))
    rows = _rows({"all": whole, "an encoder killed": without})
    print(table(rows))
    print(f"a stream whose language model is killed pauses for {', '.join(f'{pause:.2f}' for pause in pauses)} s")
    if args.json:
        write_figures(args.json, host_facts("bench.failover"), failover=rows, stream_pauses=pauses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
