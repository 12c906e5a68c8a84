"""The benchmarks start: a figure that cannot be repeated is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine import bookkeeping
from bench.preprocess import pictures, recordings
from bench.pruning import main as pruning

ROOT = Path(__file__).resolve().parents[2]


def test_bookkeeping_is_measured_at_every_context() -> None:
    rows = bookkeeping(4, [16, 64], 1)
    assert [row["context"] for row in rows] == [16, 64] and all(row["cpu_us_per_sequence"] > 0 for row in rows)


def test_pruning_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert pruning(["--questions", "0", "--pictures", "1", "--side", "4", "--layers", "2", "--keep", "0.5"]) == 0
    assert "| 2 | 0.5 |" in capsys.readouterr().out


def test_preprocessing_is_measured_on_equal_terms() -> None:
    rows = pictures([(300, 200)], ["qwen2_vl", "llava"], 1)
    assert [row["by"] for row in rows] == 2 * ["Pillow + numpy", "HF slow", "HF fast", "ours"]
    assert all(row["CPU ms"] > 0 and row["mean"] < 0.5 for row in rows)
    assert [row["by"] for row in recordings([0.5], 1)] == ["HF, numpy", "HF, torch", "ours"]


@pytest.mark.parametrize("module", ["bench.engine", "bench.preprocess", "bench.pruning"])
def test_help_has_examples_or_says_what_it_takes(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
