"""Sends jobs to a server, as fast as answers come or as a clock says, and writes down when what came."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.targets import Refused, Target, assistant, user
from bench.workloads import Job


@dataclass
class Record:
    """One turn: when it was sent, when each piece of its answer came, in seconds on one clock.

    Attributes:
        late: it was sent so much later than it was due.
        outcome: "answered", "refused", "cut off" where the load ended first, or the error.
    """

    kind: str
    sent: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    late: float = 0.0
    outcome: str = "answered"

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.sent

    @property
    def total(self) -> float:
        """Seconds to the last piece."""
        return self.pieces[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def token_latency(self) -> float:
        """Seconds from token to token, on average."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


async def closed_loop(target: Target, jobs: Iterable[Job], concurrency: int) -> list[Record]:
    """So many at a time, each followed at once by the next."""
    records: list[Record] = []
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await _play(target, job, time.perf_counter(), records)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records


async def open_loop(
    target: Target, jobs: Sequence[Job], rate: float, seed: int, records: list[Record] | None = None
) -> list[Record]:
    """Sent at random moments, ``rate`` a second on average, whether or not earlier ones are answered.

    Cancelling it cancels what is not answered yet; what came until then is in ``records``.
    """
    rng = random.Random(seed)
    records = [] if records is None else records
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(_play(target, job, due, records))
    return records


async def _play(target: Target, job: Job, due: float, records: list[Record]) -> None:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(job.turns):
        messages.append(user(turn))
        now = time.perf_counter()
        record = Record(job.kind if len(job.turns) == 1 else f"{job.kind} {number + 1}", now, tokens=job.max_tokens)
        record.late = max(0.0, now - due) if number == 0 else 0.0
        records.append(record)
        text = ""
        try:
            async for piece in target.ask(messages, job.max_tokens):
                record.pieces.append(time.perf_counter())
                text += piece
        except Refused:
            record.outcome = "refused"
            return
        except asyncio.CancelledError:
            record.outcome = "cut off"
            raise
        except Exception as error:  # whatever a server or its client comes up with is counted, and the load goes on
            record.outcome = f"{type(error).__name__}: {error}"[:200]
            return
        if not record.pieces:
            record.outcome = "empty"
            return
        messages.append(assistant(text))


def summary(records: Sequence[Record], seconds: float, ttft_target: float, token_target: float) -> dict[str, Any]:
    """What a run was like.

    Args:
        records: of the run.
        seconds: how long it took.
        ttft_target: seconds to the first piece that count as good.
        token_target: seconds from token to token, on average, that count as good.
    """
    done = [r for r in records if r.outcome == "answered"]
    good = [r for r in done if r.ttft <= ttft_target and r.token_latency <= token_target]
    kinds = sorted({r.kind for r in done})
    return {
        "requests": len(records),
        "answered": len(done),
        "refused": sum(r.outcome == "refused" for r in records),
        "failed": sum(r.outcome not in ("answered", "refused") for r in records),
        "errors": sorted({r.outcome for r in records} - {"answered", "refused"})[:3],
        "requests_per_s": round(len(done) / seconds, 3),
        "tokens_per_s": round(sum(r.tokens for r in done) / seconds, 2),
        "goodput_per_s": round(len(good) / seconds, 3),
        "ttft_ms": quantiles([r.ttft for r in done]),
        "ttft_ms_by_kind": {kind: quantiles([r.ttft for r in done if r.kind == kind]) for kind in kinds},
        "inter_token_ms": quantiles([gap for r in done for gap in r.gaps]),
        "total_ms": quantiles([r.total for r in done]),
        "most_late_ms": round(1e3 * max((r.late for r in records), default=0.0), 1),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles, in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    cuts = statistics.quantiles([*seconds, *seconds] if len(seconds) == 1 else seconds, n=100, method="inclusive")
    return {f"p{p}": round(1e3 * cuts[p - 1], 1) for p in (50, 90, 99)}
