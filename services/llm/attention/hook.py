"""The one attention function and the one mask function that every decoder calls, registered with transformers.

Whoever runs the decoder sets :data:`current` first: a step (``plan.StepPlan``) or a probe (``layers.LayerProbe``). A context
variable reaches the function through every family's call signature.
"""

from __future__ import annotations

import contextvars
from typing import Any, Protocol

import torch

from services.models.hf import masking_utils, transformers

NAME = "triptych_paged"


class Attends(Protocol):
    """Computes one layer's attention of a packed call."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Query ``[heads, tokens, head_dim]``, key and value ``[kv_heads, keys, head_dim]`` to ``[tokens, heads, value_dim]``."""
        ...


current: contextvars.ContextVar[Attends | None] = contextvars.ContextVar("current", default=None)


def _attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, keys, head_dim], after RoPE; keys == tokens but in cross-attention
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    who = current.get()
    assert who is not None, "the decoder runs outside a step"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return who.attend(module, query[0], key[0], value[0], scaling, sliding_window, softcap).unsqueeze(0), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask inside a step, which knows its own; outside, the family's own rule for a whole prompt."""
    if current.get() is not None:
        return None
    return masking_utils.sdpa_mask(*args, **kwargs)


transformers.AttentionInterface.register(NAME, _attention)
transformers.AttentionMaskInterface.register(NAME, _mask)
