"""The stack of three services as one of the engines of a comparison."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from bench.arrivals import closed_loop
from bench.incumbents.client import Ended
from bench.measure import Cost
from bench.processes import Meter, services_under
from bench.targets import Grpc
from bench.workloads import Job
from scripts.local_stack import local_stack


class Ours:
    """Gateway, encoder and language model, asked over gRPC; a context manager.

    Args:
        checkpoint: what they load.
        dtype: in which type.
    """

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self._resources = contextlib.ExitStack()
        stack = self._resources.enter_context(local_stack("--model", str(checkpoint), "--dtype", dtype, quiet=True))
        self._services = services_under(stack.process.pid)
        self._address = stack.address

    def run(self, jobs: Sequence[Job]) -> Cost:
        """All at once; CPU seconds are those of the services, not of this client.

        Raises:
            Ended: a request was refused or failed.
        """
        meter, started = Meter(self._services), time.perf_counter()

        async def load() -> None:
            target = Grpc(self._address)
            await target.connect()
            records = await closed_loop(target, jobs, len(jobs))
            await target.close()
            if wrong := {record.outcome for record in records} - {"answered"}:
                raise Ended(f"not every request was answered: {', '.join(sorted(wrong))}")

        asyncio.run(load())
        return self._cost(meter, started)

    def idle(self, seconds: float) -> Cost:
        """What the services cost while nobody asks anything."""
        meter, started = Meter(self._services), time.perf_counter()
        time.sleep(seconds)
        return self._cost(meter, started)

    def _cost(self, meter: Meter, started: float) -> Cost:
        wall = time.perf_counter() - started
        parts = meter.read()["cpu_s"]
        return Cost(parts.pop("all"), wall, parts)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
