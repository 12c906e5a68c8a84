"""Rotary frequencies that transformers chooses by the longest position of a call: one set per engine, whatever is packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.llm.config import LlmConfig
from services.llm.model_runner import ModelRunner
from services.models.checkpoint import open_checkpoint
from tests.llm.families import Case, load_case
from tests.llm.test_matrix import Stepped

SWITCH = 64  # tokens at which these checkpoints change their frequencies


@pytest.mark.parametrize("family", ["phi3", "llama_dynamic"])
def test_below_the_switch_all_equals_generate(checkpoint_dir: Callable[[str], Path], family: str) -> None:
    case = load_case(checkpoint_dir(family), 6, range(1, SWITCH + 1), max_model_len=SWITCH)
    assert len(case.asks) >= 3
    Stepped(case).check(case.asks)


def test_above_the_switch_all_equals_generate(checkpoint_dir: Callable[[str], Path]) -> None:
    case = load_case(checkpoint_dir("phi3"), 14, range(SWITCH + 1, 400))
    assert len(case.asks) >= 4
    Stepped(case, threshold=9).check(case.asks)


@pytest.mark.parametrize("family", ["phi3", "llama_dynamic"])
def test_a_long_neighbour_changes_nothing(checkpoint_dir: Callable[[str], Path], family: str) -> None:
    path = checkpoint_dir(family)
    case = load_case(path, 14)
    runner = ModelRunner(
        open_checkpoint(str(path)),
        LlmConfig(dtype="float32", block_size=4, max_num_seqs=8, max_model_len=512, kv_cache_memory_bytes=16 << 20),
    )
    case = Case(case.checkpoint, runner, case.asks)
    short, long = case.asks[0], case.asks[-1]
    assert len(short.answer.prompt) + 12 < SWITCH < len(long.answer.prompt)
    alone, packed = Stepped(case), Stepped(case)
    assert packed.tokens([short, long], check=False)[0] == alone.tokens([short], check=False)[0]
