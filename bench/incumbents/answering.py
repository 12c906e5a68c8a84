"""What the engines' scripts share: run a load for each line on standard input, and print what it cost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.load import Ask, read_load


def serve_loads(answer: Callable[[Sequence[Ask]], list[int]]) -> None:
    """Until standard input ends.

    Args:
        answer: runs requests together; returns how many tokens each got.
    """
    for line in sys.stdin:
        asks = read_load(Path(line.strip()))
        cpu, wall = time.process_time(), time.perf_counter()
        made = answer(asks)
        cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        assert made == [ask.new_tokens for ask in asks], f"it generated {made} tokens"
        print(json.dumps(cost), flush=True)
