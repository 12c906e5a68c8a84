"""What it costs to bring embeddings from an encoder to a language model: ``python -m bench.transport``.

Both ends run in this process, over gRPC on loopback, so that its CPU seconds are those of both together: rows that lie in
an encoder's store become rows that a language model's fetcher hands on. Once sent in chunks, once read where they lie.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import grpc
import torch
import uvloop

from bench.command import new_parser, report
from bench.measure import cost_of, interleave, median
from services.common.server import SERVER_OPTIONS
from services.encoder.config import EncoderConfig
from services.encoder.sent import add_to_server
from services.encoder.servicer import EncoderServicer
from services.encoder.store import Done, Header, Store
from services.llm.embeddings import RemoteItem, RowFetcher
from services.models.checkpoint import open_checkpoint
from services.models.media import Grid

HIDDEN = 2048
EXAMPLES = """examples:
  python -m bench.transport
  python -m bench.transport --items 4 --megabytes 64 --json figures/transport.json
"""


class Transport:
    """An encoder that holds items, and a language model's fetcher.

    Args:
        items: how many.
        megabytes: size of each, float32.
        chunk_bytes: largest chunk of rows in a message.
        shared: whether the fetcher may read the encoder's memory.
    """

    def __init__(self, items: int, megabytes: int, chunk_bytes: int, *, shared: bool) -> None:
        self.nbytes = items * megabytes * 2**20
        self._rows, self._items = megabytes * 2**20 // (4 * HIDDEN), items
        checkpoint = open_checkpoint("")
        self._store = Store(3600, shared_items=2**10 if shared else 0)
        config = EncoderConfig(shared_memory="auto" if shared else "off", max_chunk_bytes=chunk_bytes)
        self._servicer = EncoderServicer(checkpoint, config, self._store)
        self._fetcher = RowFetcher(checkpoint.fingerprint, HIDDEN, max_chunk_bytes=chunk_bytes)
        self._refs: list[str] = []

    async def start(self) -> None:
        """Fill the store and serve it."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_to_server(self._servicer, self._server)
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        for _ in range(self._items):
            ref = self._store.claim(uuid.uuid4().bytes, 0)
            self._store.open(ref.entry, Header(self._rows, Grid(1, 1, self._rows), ((HIDDEN, torch.float32),)))
            self._store.append(ref.entry, [torch.randn(self._rows, HIDDEN)])
            self._store.finish(ref.entry, Done(0, 0))
            self._refs.append(ref.ref_id)

    async def fetch(self) -> None:
        """Every row once, written into a matrix as the language model does."""
        merged = torch.empty(self._rows, HIDDEN)
        place = 0

        def write(span: int, feature: int, rows: torch.Tensor) -> None:
            nonlocal place
            merged[place : place + len(rows)].copy_(rows)
            place += len(rows)

        for ref in self._refs:
            place = 0
            await self._fetcher.fetch("bench", [RemoteItem(ref, self._address, [(0, self._rows)], [0])], write, 60)
            assert place == self._rows, f"{place} rows of {self._rows}"

    async def stop(self) -> None:
        """End the service."""
        await self._fetcher.close()
        await self._server.stop(None)
        self._store.clear()


def measure(items: int, megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way, with CPU and wall seconds of both ends together."""
    ways = {
        "sent, 256 KiB": Transport(items, megabytes, 2**18, shared=False),
        "sent, 1 MiB": Transport(items, megabytes, 2**20, shared=False),
        "read in place": Transport(items, megabytes, 2**20, shared=True),
    }
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        for way in ways.values():
            loop.run_until_complete(way.start())
        runs = {name: lambda way=way: cost_of(lambda: loop.run_until_complete(way.fetch())) for name, way in ways.items()}
        costs = {name: median(found) for name, found in interleave(runs, rounds).items()}
        for way in ways.values():
            loop.run_until_complete(way.stop())
    finally:
        loop.close()
    gigabytes, sent = items * megabytes * 2**20 / 1e9, costs["sent, 1 MiB"].cpu
    return [
        {
            "rows are": name,
            "CPU s per GB": round(cost.cpu / gigabytes, 3),
            "wall s per GB": round(cost.wall / gigabytes, 3),
            "times cheaper than sent, 1 MiB": round(sent / cost.cpu, 2),
        }
        for name, cost in costs.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with ``--json`` write too."""
    parser = new_parser("bench.transport", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--items", type=int, default=16, help="items fetched one after the other (default %(default)s)")
    add("--megabytes", type=int, default=16, help="size of an item (default %(default)s)")
    add("--rounds", type=int, default=7, help="rounds; medians count (default %(default)s)")
    args = parser.parse_args(argv)
    rows = measure(args.items, args.megabytes, args.rounds)
    report("bench.transport", args.json, {"transport": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
