"""C++ for CPUs, compiled where it runs and checked against torch before it is trusted; without a compiler torch does the work."""

from __future__ import annotations

from typing import Any

from services.llm.native.layer import replace_decoder_layers
from services.llm.native.linear import speed_up
from services.llm.native.norm import replace_norms


def replace_layers(model: Any, decoder: Any) -> None:
    """Let a decoder's layers run natively where their results stay and that is faster. No weight is held twice."""
    replace_decoder_layers(decoder)
    speed_up(model, decoder)
    replace_norms(decoder)
