"""What the benchmarks' command lines share: their help, progress on stderr, tables on stdout and one shape of JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.measure import host_facts, table, write_figures

T = TypeVar("T")


def new_parser(module: str, doc: str | None, examples: str) -> argparse.ArgumentParser:
    """A parser of ``python -m module``, which takes ``--json``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure here")
    return parser


def listed(kind: Callable[[str], T], known: Sequence[str] = ()) -> Callable[[str], list[T]]:
    """Reads values with commas between them; where ``known`` is given, each must be one of those."""

    def read(text: str) -> list[T]:
        parts = text.split(",")
        if known and (unknown := set(parts) - set(known)):
            raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(known)}")
        return [kind(part) for part in parts]

    return read


def say(line: str) -> None:
    """Progress, which is no result."""
    print(line, file=sys.stderr, flush=True)


def report(module: str, file: Path | None, results: Mapping[str, list[dict[str, Any]]], **more: Any) -> None:
    """Print a table for each section; with ``file`` write ``{"host": ..., "results": {section: rows}, **more}`` too."""
    for section, rows in results.items():
        if rows:
            print(f"\n{section}\n{table(rows)}", flush=True)
    if file:
        write_figures(file, host_facts(module), results=results, **more)
