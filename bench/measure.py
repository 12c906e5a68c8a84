"""Clocks, interleaved rounds, medians, and facts about the host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Seconds of one run: of all the process's threads on CPUs, and on the wall.

    Attributes:
        parts: CPU seconds of each of several processes, where ``cpu`` is the sum over them.
    """

    cpu: float
    wall: float
    parts: Mapping[str, float] = field(default_factory=dict)


def cost_of(run: Callable[[], object]) -> Cost:
    """Run once."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def interleave(runs: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """Every run once per round, in turn, so that a noisy neighbour meets all of them; one unmeasured round goes first."""
    for run in runs.values():
        run()
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        for name, run in runs.items():
            costs[name].append(run())
        latest = ", ".join(f"{name} {found[-1].cpu:.3f}" for name, found in costs.items())
        print(f"round {number} of {rounds}, CPU s: {latest}", file=sys.stderr, flush=True)
    return costs


def median(costs: list[Cost]) -> Cost:
    """Median of each figure by itself."""
    parts = {name: statistics.median(c.parts[name] for c in costs) for name in costs[0].parts}
    return Cost(statistics.median(c.cpu for c in costs), statistics.median(c.wall for c in costs), parts)


def host_facts(module: str) -> dict[str, Any]:
    """What a reader needs to compare the figures with their own, and to repeat them with ``python -m module``."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "vector_extensions": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_figures(file: Path, facts: dict[str, Any], **figures: Any) -> None:
    """Write what was measured, and on what host, as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"host": facts, **figures}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys, in columns."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as a table of Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])
