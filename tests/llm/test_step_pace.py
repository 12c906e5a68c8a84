"""The bound on prompt tokens beside decodes follows what steps take."""

from __future__ import annotations

import pytest

from services.llm.config import LlmConfig
from services.llm.step_pace import StepPace


def test_the_bound_keeps_a_step_within_the_stretch() -> None:
    pace = StepPace(1.25)
    assert pace.prompt_tokens is None, "nothing is known yet"
    pace.note(0, 500, 9.0)  # a prompt alone says nothing of a step that decodes
    pace.note(4, 0, 0.040)
    assert pace.prompt_tokens is None
    pace.note(4, 200, 0.140)  # 0.5 ms a token
    assert pace.prompt_tokens == 20
    for _ in range(100):
        pace.note(4, 0, 0.080)
    assert pace.prompt_tokens == 39, "decode steps have become slower"
    for _ in range(100):
        pace.note(4, 100, 0.880)
    assert pace.prompt_tokens == 16, "prompts go on, however dear they are"


def test_without_a_stretch_there_is_no_bound() -> None:
    pace = StepPace(0.0)
    pace.note(4, 0, 0.040)
    pace.note(4, 200, 0.140)
    assert pace.prompt_tokens is None


def test_a_stretch_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--decode-stretch must be above 1, or 0 for no bound, got 0\.5"):
        LlmConfig(decode_stretch=0.5)
