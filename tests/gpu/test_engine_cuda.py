"""The engine on a GPU in float32, where attention is gathered: tokens and logits of ``generate()`` on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.llm.attention import choose_backend
from services.llm.model_runner import StepOutput
from services.llm.scheduler import Chunk
from tests.llm.families import load_case
from tests.llm.test_matrix import Stepped

DEVICE = "cuda:0"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "mistral", "qwen3_vl", "gemma3", "gemma2", "mllama"])
def test_greedy_tokens_equal_a_cpus(family: str, checkpoint_dir: Callable[[str], Path]) -> None:
    case = load_case(checkpoint_dir(family), device=DEVICE)
    compute = case.runner.run

    def run(chunks: Sequence[Chunk], scores: Collection[str] = ()) -> StepOutput:
        output = compute(chunks, scores)
        return replace(output, logits=output.logits.cpu())

    case.runner.run = run  # type: ignore[method-assign]
    stepped = Stepped(case, threshold=7)
    case.runner.builder.backend = choose_backend("auto", DEVICE)
    stepped.check(case.asks, rows=11)
    stepped.check(case.asks, n=2)
