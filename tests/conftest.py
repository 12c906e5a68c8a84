"""Checkpoints for tests: random weights, made once a session by scripts/make_checkpoint.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test machines have two cores and the stack has three processes
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint_dir("llava")`` is a folder with a tiny checkpoint of that family."""
    from scripts.make_checkpoint import main

    @functools.cache
    def make(family: str) -> Path:
        out = tmp_path_factory.mktemp("checkpoints") / family
        assert main(["--family", family, "--out", str(out), "--seed", "11"]) == 0
        return out

    return make


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells of a failure at once: a run that is ended from outside reaches no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", flush=True)
