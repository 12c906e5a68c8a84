"""The benchmarks start: a figure that cannot be repeated is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.counting import measure as counting
from bench.counting import ways
from bench.encoder import main as encoder
from bench.engine import bookkeeping
from bench.engine import main as engine
from bench.failover import main as failover
from bench.gateway import main as gateway
from bench.preprocess import main as preprocess
from bench.preprocess import photo, pictures, recordings
from bench.pruning import main as pruning
from bench.transport import main as transport_main
from bench.transport import measure as transport


def test_bookkeeping_is_measured_at_every_context() -> None:
    rows = bookkeeping(4, [16, 64], 1)
    assert [row["context"] for row in rows] == [16, 64] and all(row["cpu_us_per_sequence"] > 0 for row in rows)


def test_pruning_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert pruning(["--questions", "0", "--pictures", "1", "--side", "4", "--layers", "2", "--keep", "0.5"]) == 0
    assert "| 2 | 0.5 |" in capsys.readouterr().out


def test_the_gateway_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gateway(["--sections", "overload", "--seconds", "4", "--loads", "2"]) == 0
    assert "refusal p99 ms" in capsys.readouterr().out


def test_the_encoder_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert encoder(["--tiny", "--dtypes", "float32", "--images", "3", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "packed_cpu_ms" in out and "picture of 7 tiles" in out and "video of 32 frames" in out


def test_preprocessing_is_measured_on_equal_terms() -> None:
    rows = pictures([(300, 200)], ["qwen2_vl", "llava"], 1)
    assert [row["by"] for row in rows] == 2 * ["Pillow + numpy", "HF slow", "HF fast", "ours"]
    assert all(row["CPU ms"] > 0 and row["mean"] < 0.5 for row in rows)
    assert [row["by"] for row in recordings([0.5], 1)] == ["HF, numpy", "HF, torch", "ours"]


def test_counting_is_measured_on_equal_terms(checkpoint_dir: Callable[[str], Path]) -> None:
    ids = {way: run() for way, run in ways(checkpoint_dir("qwen2_vl"), photo(300, 200)).items()}
    assert list(ids) == ["ours", "ours with SHA-256", "transformers"]
    assert ids["ours"] == ids["ours with SHA-256"] == ids["transformers"]
    rows = counting("qwen2_vl", checkpoint_dir("qwen2_vl"), 1)
    assert [row["picture"] for row in rows] == 3 * ["100x100"] + 3 * ["4000x3000"]
    ours, _, processor = rows[3:]
    assert ours["tokens"] == processor["tokens"] and ours["transformers to it"] > 1 == processor["transformers to it"]


def test_transport_is_measured() -> None:
    rows = transport(1, 1, 1)
    assert [row["rows are"] for row in rows] == ["sent, 256 KiB", "sent, 1 MiB", "read in place"]
    assert all(row["CPU s per GB"] > 0 for row in rows)


MAINS = [encoder, engine, failover, gateway, preprocess, pruning, transport_main]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_help_says_what_it_takes(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out
