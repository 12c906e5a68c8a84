"""Options that make no sense are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.llm.config import LlmConfig


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": -1},
        {"threads": -1},
        {"max_model_len": -8},
        {"long_prefill_token_threshold": -1},
        {"watchdog_seconds": -0.5},
        {"watchdog_seconds": float("nan")},
        {"max_num_seqs": 0},
        {"gpu_memory_utilization": 1.5},
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
    ],
)
def test_refused_options(options: dict[str, Any]) -> None:
    name = next(iter(options)).replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name}"):
        LlmConfig(**options)
