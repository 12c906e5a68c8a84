"""The load generator sends what it says, when it says, and counts what comes of it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from bench.arrivals import Record, closed_loop, open_loop, quantiles, summary
from bench.beside import main as beside
from bench.checkpoints import main as checkpoints
from bench.compare import main as compare
from bench.overhead import main as overhead
from bench.processes import Meter, descendants, pin
from bench.serve import main as serve
from bench.serve import warm_to_cold
from bench.summary import main as summarize
from bench.targets import Refused
from bench.workloads import COLD, WARM, WORKLOADS, Job, Sizes, make_jobs
from tests.patience import PATIENCE

SMALL = Sizes(words=3, width=64, height=48, seconds=0.5, max_tokens=2)


class Echo:
    """Answers with two pieces, or as a test has it; none before so many were asked for."""

    def __init__(self, answer: Callable[[int], list[str] | Exception] = lambda number: ["a", "b"], after: int = 0) -> None:
        self.asked: list[Sequence[dict[str, Any]]] = []
        self.running = self.most = 0
        self._answer, self._after, self._all_there = answer, after, asyncio.Event()

    async def ask(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> AsyncIterator[str]:
        self.asked.append(list(messages))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            number = len(self.asked) - 1
            if len(self.asked) >= self._after:
                self._all_there.set()
            await self._all_there.wait()
            await asyncio.sleep(0)
            pieces = self._answer(number)
            if isinstance(pieces, Exception):
                raise pieces
            for piece in pieces:
                yield piece
        finally:
            self.running -= 1

    async def close(self) -> None: ...


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_makes_the_same_requests(workload: str) -> None:
    jobs = make_jobs(workload, 9, 4, SMALL)
    assert jobs == make_jobs(workload, 9, 4, SMALL) != make_jobs(workload, 9, 5, SMALL)
    assert workload == "repeated" or len({str(job) for job in jobs}) == 9


def test_a_mix_has_all_kinds_and_pictures_come_again() -> None:
    kinds = [job.kind for job in make_jobs("mixed", 200, 1, SMALL)]
    assert 0.5 < kinds.count("text") / 200 < 0.7 and {"image", "audio", "video"} < set(kinds)
    again = make_jobs("repeated", 32, 1, SMALL)
    assert len({str(job.turns[0][0]) for job in again}) == 8 and len({str(job.turns[0][1]) for job in again}) == 32
    assert [job.kind for job in again] == 8 * [COLD] + 24 * [WARM]


def test_a_closed_loop_keeps_so_many_running_and_turns_follow_answers() -> None:
    target = Echo()
    records = asyncio.run(closed_loop(target, make_jobs("multi-turn", 7, 1, SMALL), 3))
    assert target.most == 3 and len(records) == 21 and {r.outcome for r in records} == {"answered"}
    last = max(target.asked, key=len)
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"][0]["text"] == "ab"


def test_an_open_loop_does_not_wait_for_answers() -> None:
    target = Echo(after=50)
    jobs = [Job("text", (({"type": "text", "text": "x"},),), 2)] * 50
    asyncio.run(asyncio.wait_for(open_loop(target, jobs, rate=1e4, seed=1), PATIENCE))
    assert target.most == 50


def test_an_open_loop_that_is_cancelled_cancels_what_it_asked() -> None:
    target, records = Echo(after=3), list[Record]()
    jobs = make_jobs("text", 2, 1, SMALL)

    async def run() -> None:
        load = asyncio.create_task(open_loop(target, jobs, rate=1e4, seed=1, records=records))
        while target.running < 2:
            await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert target.running == 0 and [record.outcome for record in records] == 2 * ["cut off"]


def test_what_is_refused_and_what_fails_is_counted() -> None:
    answers: list[list[str] | Exception] = [["a"], Refused("busy"), ValueError("broken"), []]
    target = Echo(lambda number: answers[number])
    jobs = make_jobs("text", 4, 1, SMALL)
    got = summary(asyncio.run(closed_loop(target, jobs, 1)), 2.0, 1.0, 1.0)
    assert (got["answered"], got["refused"], got["failed"], got["requests_per_s"]) == (1, 1, 2, 0.5)
    assert got["errors"] == ["ValueError: broken", "empty"]


def test_goodput_counts_what_came_in_time() -> None:
    fast, slow, halting = (
        Record("text", 0.0, [0.1, 0.2], 2),
        Record("text", 0.0, [3.0, 3.1], 2),
        Record("text", 0.0, [0.1, 5.0], 2),
    )
    got = summary([fast, slow, halting], 1.0, ttft_target=1.0, token_target=0.5)
    assert got["goodput_per_s"] == 1.0 and got["requests_per_s"] == 3.0
    assert got["ttft_ms"]["p50"] == 100.0 and got["inter_token_ms"]["p99"] > 4000
    assert quantiles([]) == {} and quantiles([0.5]) == {"p50": 500.0, "p90": 500.0, "p99": 500.0}


def test_first_tokens_are_told_apart_by_what_was_asked() -> None:
    cold, warm = Record(COLD, 0.0, [0.4], 1), Record(WARM, 0.0, [0.1], 1)
    row = summary([cold, warm, cold, warm], 1.0, ttft_target=1.0, token_target=1.0)
    assert warm_to_cold(row) == 0.25
    assert warm_to_cold(summary([cold], 1.0, ttft_target=1.0, token_target=1.0)) is None


def test_processes_are_metered_with_their_children() -> None:
    meter = Meter({"me": os.getpid()})
    random.Random(1).sample(range(10**6), 10**5)
    sum(i * i for i in range(3_000_000))
    read = meter.read()
    assert read["cpu_s"]["me"] > 0.05 and read["peak_mib"]["me"] > 10 and os.getpid() in descendants(os.getpid())


def test_a_process_is_pinned_with_its_threads() -> None:
    script = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        cpu = min(os.sched_getaffinity(0))
        pin(process.pid, [cpu])
        threads = [int(task) for task in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) == 2 and all(os.sched_getaffinity(thread) == {cpu} for thread in threads)
        process.stdin.close()


@pytest.mark.parametrize("main", [beside, checkpoints, compare, overhead, serve, summarize], ids=lambda main: main.__module__)
def test_help(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "examples:" in capsys.readouterr().out
