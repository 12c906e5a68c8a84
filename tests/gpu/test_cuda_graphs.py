"""Decoding steps replayed as CUDA graphs against the same steps computed eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from services.llm.attention.cuda import unusable
from services.llm.attention.plan import StepPlan
from services.llm.cuda_graphs import DecodeGraphs
from services.llm.engine import Engine, Request
from services.llm.events import Accepted, Finished, Token
from services.llm.kv_cache import KvCache
from services.llm.model_runner import ModelRunner
from services.llm.scheduler import Scheduler
from tests.llm.families import Case, load_case

DEVICE = "cuda:0"
pytestmark = pytest.mark.skipif(
    unusable(DEVICE if torch.cuda.is_available() else "cpu") is not None, reason="needs CUDA with FlashAttention"
)


@dataclass
class Checked:
    """Stands in for the graphs of a runner: every step is computed both ways."""

    graphs: DecodeGraphs
    runner: ModelRunner
    batches: set[int] = field(default_factory=set)

    def run(self, arguments: dict[str, Any], plan: StepPlan) -> torch.Tensor:
        eager = self.runner._decode(arguments, plan)
        replayed = self.graphs.run(arguments, plan)
        torch.testing.assert_close(replayed, eager, atol=5e-2, rtol=5e-2)
        self.batches.add(len(replayed))
        return replayed


def serve(case: Case, copies: int) -> list[list[int]]:
    """Answers to every ask, ``copies`` times over, all at once."""
    runner = case.runner
    scheduler = Scheduler(KvCache(runner.groups, runner.block_size, b"model"), 2048, 8)
    engine = Engine(runner, scheduler)
    asks = [ask for ask in case.asks for _ in range(copies)]
    requests = [Request(ask.arguments(str(i), max_tokens=8 + i)) for i, ask in enumerate(asks)]
    tokens: list[list[int]] = [[] for _ in requests]
    for request, ask in zip(requests, asks, strict=True):
        engine.submit(request)
        for item, features in enumerate(ask.features):
            for feature, rows in enumerate(features):
                engine.write_rows(request, item, feature, rows)
    assert engine._drain_commands(wait=False)
    while engine.step():
        for request, event in engine._outbox:
            assert isinstance(event, Accepted | Finished | Token), event
            if isinstance(event, Token):
                tokens[requests.index(request)].append(event.choice.token)
        engine._outbox.clear()
    assert [len(answer) for answer in tokens] == [8 + i for i in range(len(tokens))]
    return tokens


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "mistral"])
def test_replayed_steps_equal_eager_ones(family: str, checkpoint_dir: Callable[[str], Path]) -> None:
    options = {"device": DEVICE, "dtype": "bfloat16", "block_size": 256, "max_model_len": 1024}
    case = load_case(checkpoint_dir(family), **options)
    assert case.runner.graphs is not None, "these families are recorded at load"
    checked = Checked(case.runner.graphs, case.runner)
    case.runner.graphs = checked  # type: ignore[assignment]
    replayed = serve(case, 2)
    assert len(checked.batches) >= 3 and any(batch & (batch - 1) for batch in checked.batches), "padded batches were among them"
    assert not any(keys[-1].any() for keys in case.runner.pool.keys.values()), "the padding block was written"
    case.runner.graphs = checked.graphs
    assert serve(case, 2) == replayed


def test_enforce_eager_records_nothing(checkpoint_dir: Callable[[str], Path]) -> None:
    case = load_case(checkpoint_dir("llama"), 1, device=DEVICE, dtype="bfloat16", block_size=256, enforce_eager=True)
    assert case.runner.graphs is None


def test_float32_records_nothing(checkpoint_dir: Callable[[str], Path]) -> None:
    assert load_case(checkpoint_dir("llama"), 1, device=DEVICE).runner.graphs is None
