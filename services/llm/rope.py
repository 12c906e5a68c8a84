"""Pins rotary frequencies that transformers would choose anew for every call by its longest position.

In a packed step one long sequence would change the frequencies of all others, and a sequence's own keys would disagree
with its later queries. An engine therefore uses one set for all: the one for its ``max_model_len``.
"""

from __future__ import annotations

from typing import Any

import torch

_PINNED = "pinned"


@torch.no_grad()
def pin(decoder: Any, max_model_len: int) -> None:
    """Choose the frequencies of dynamic and longrope RoPE once; other kinds are left as they are."""
    for module in decoder.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and _changes(kind):
            _choose(module, max_model_len)
            module.rope_type = _PINNED
        elif isinstance(kind, dict):
            for layer_type in [name for name, value in kind.items() if _changes(value)]:
                _choose(module, max_model_len, layer_type=layer_type)
                kind[layer_type] = _PINNED


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _choose(module: Any, max_model_len: int, **layer_type: str) -> None:
    device = next(module.buffers()).device
    module(torch.zeros(1, 1, 1, device=device), torch.tensor([[max_model_len - 1]], device=device), **layer_type)
