"""Comparisons go on when an engine does not, and say what was compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.arrivals import Record
from bench.beside import Engine, Heard
from bench.beside import row_of as beside_row
from bench.compare import Found, rows_of
from bench.incumbents.client import Ended, Incumbent
from bench.incumbents.vllm_server import vllm_server
from bench.measure import Cost, markdown, median
from bench.overhead import compared, of_idle
from bench.summary import main as summarize

ANSWERS = "for line in sys.stdin: print('chatter'); print('{\"cpu\": 2.0, \"wall\": 1.0}', flush=True)"


def _engine(script: str, log: Path) -> Incumbent:
    return Incumbent([sys.executable, "-c", f"import os, signal, sys\n{script}"], log)


def test_an_engine_runs_a_load_each_time_it_is_told_to(tmp_path: Path) -> None:
    with _engine(ANSWERS, tmp_path / "log") as engine:
        assert [engine.run(tmp_path), engine.run(tmp_path)] == 2 * [Cost(2.0, 1.0)]


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("sys.stdin.readline(); os.kill(os.getpid(), signal.SIGFPE)", "killed by SIGFPE"),
        ("sys.exit('no such model')", "exited with code 1\n  no such model"),
    ],
)
def test_an_engine_that_ends_says_how(script: str, how: str, tmp_path: Path) -> None:
    with _engine(script, tmp_path / "log") as engine, pytest.raises(Ended) as ended:
        engine.run(tmp_path)
        engine.run(tmp_path)
    assert str(ended.value) == how


def test_an_engine_that_ended_has_no_row() -> None:
    costs = {("here", 8): [Cost(2.0, 1.0, {"llm": 1.5, "gateway": 0.5})] * 3, ("gone", 8): [Cost(1.0, 1.0)]}
    (row,) = rows_of("image", Found(costs, {"gone": "killed by SIGFPE"}))
    assert (row["engine"], row["requests/CPU s"], row["of services"]) == ("here", 4.0, "llm 1.50, gateway 0.50")


def test_overhead_is_what_the_engine_by_itself_does_without() -> None:
    stack = [Cost(2.0, 3.0, {"llm": 1.8, "gateway": 0.2}), Cost(4.0, 3.0, {"llm": 3.6, "gateway": 0.4})]
    row = compared([*stack, stack[0]], [Cost(1.5, 1.0)] * 3)
    assert (row["overhead"], row["llm, CPU s"], row["gateway, CPU s"]) == (0.25, 1.8, 0.2)
    assert of_idle(Cost(0.1, 10.0, {"llm": 0.1})) == {"idle, CPU ms/s": "llm 10.0"}
    assert median(stack).parts["gateway"] == pytest.approx(0.3)


def test_text_beside_pictures_is_compared_by_the_median_round() -> None:
    def heard(gap: float, pictures: int) -> Heard:
        seen = [Record("image", 0.0, [0.1], 1)] * pictures
        return Heard([Record("text", 0.0, [0.1, 0.1 + gap, 0.1 + 2 * gap], 3)], seen, {"all": 2.0}, 2.0)

    engine = Engine("ours", "float32", "", "", {})
    row = beside_row(engine, 1.0, [heard(0.01, 0)] * 3, [heard(0.02, 2), heard(0.03, 2), heard(9, 2)])
    assert row["p99 beside / alone"] == 3.0 and row["cores used beside"] == 1.0
    assert (row["asked about"], row["answered"], row["failed"]) == (6, 6, 0)


def test_the_summary_has_every_table(tmp_path: Path) -> None:
    host = {"cpus": 2, "cpu": "a", "vector_extensions": ["avx2"], "load_average": 0.1, "python": "3", "torch": "2"}
    host |= {"transformers": "5", "threads": 1, "command": "python -m bench.compare", "date": "2026-11-30"}
    rows = [{"at a time": n, "engine": e, "tokens/CPU s": 5.0, "requests/CPU s": 1.0} for n in (1, 8) for e in ("ours", "theirs")]
    assert markdown(rows[:1]).splitlines()[2] == "| 1 | ours | 5.0 | 1.0 |"
    assert summarize([str(tmp_path)]) == 1
    (tmp_path / "compare.json").write_text(json.dumps({"host": host, "results": {"text": rows, "text: left out": []}}))
    assert summarize([str(tmp_path)]) == 0
    page = (tmp_path / "summary.md").read_text()
    assert "## compare" in page and "### text\n" in page and "| 8 | theirs |" in page and "left out" not in page
    assert (tmp_path / "compare-text.png").stat().st_size > 1000


def test_a_server_of_another_engine_is_found_from_anywhere_and_its_end_is_told(tmp_path: Path) -> None:
    """Its Python is named as make names it, relative to here; it starts elsewhere."""
    python = os.path.relpath(sys.executable)
    with pytest.raises(Ended, match="exited with code 1"), vllm_server(python, tmp_path, "float32", 1, tmp_path / "log"):
        pytest.fail("it has no vllm")
    assert "No module named 'vllm'" in (tmp_path / "log").read_text()
