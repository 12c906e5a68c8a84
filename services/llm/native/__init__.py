"""C++ for CPUs, compiled where it runs and checked against torch before it is trusted; without a compiler torch does the work."""

from __future__ import annotations

from typing import Any

from services.llm.native.linear import speed_up
from services.llm.native.norm import replace_norms


def replace_layers(model: Any, decoder: Any) -> None:
    """Let a decoder's linear layers and norms run natively where that is faster. No weight is held twice."""
    speed_up(model, decoder)
    replace_norms(decoder)
