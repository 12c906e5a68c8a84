"""One page of all that benchmarks have left in a folder: ``python -m bench.summary FOLDER``.

Reads the JSON files that ``--json`` of the benchmarks wrote there and writes ``summary.md`` beside them, with every table, and a
picture of each comparison of engines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure import markdown
from bench.plots import bars

EXAMPLES = """examples:
  python -m bench.summary .bench/results
"""


def page(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown of what was measured.

    Args:
        figures: of each file, what it holds.
    """
    parts = ["# Benchmark results"]
    for name, found in figures.items():
        host = found["host"]
        where = f"{host['cpus']} x {host['cpu']} ({', '.join(host['vector_extensions'])}), load average {host['load_average']}"
        versions = ", ".join(f"{package} {host[package]}" for package in ("python", "torch", "transformers"))
        parts.append(f"## {name}\n\n`{host['command']}`, {host['date']}: {where}, {versions}, OMP_NUM_THREADS={host['threads']}")
        parts += [f"### {section}\n\n{markdown(rows)}" for section, rows in found["results"].items() if rows]
    return "\n\n".join(parts) + "\n"


def draw_engines(rows: Sequence[Mapping[str, Any]], unit: str, file: Path) -> None:
    """Bars of every engine, grouped by requests at a time."""
    counts, engines = (list(dict.fromkeys(row[name] for row in rows)) for name in ("at a time", "engine"))
    values = {(row["engine"], row["at a time"]): row[unit] for row in rows}
    series = {engine: [values.get((engine, count), float("nan")) for count in counts] for engine in engines}
    bars(file, unit, [f"{count} at a time" for count in counts], series)


def main(argv: list[str] | None = None) -> int:
    """Write the page; 1 where the folder has no figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.summary", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where benchmarks wrote their JSON")
    folder = parser.parse_args(argv).folder
    figures = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    if not figures:
        print(f"bench.summary: error: no JSON file in {folder}", file=sys.stderr)
        return 1
    for section, unit in (("text", "tokens/CPU s"), ("image", "requests/CPU s")):
        if rows := figures.get("compare", {}).get("results", {}).get(section):
            draw_engines(rows, unit, folder / f"compare-{section}.png")
    out = folder / "summary.md"
    out.write_text(page(figures))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
