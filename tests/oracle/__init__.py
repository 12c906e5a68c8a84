"""The oracle for every family: stock transformers' processor and ``generate()``, and each media item's rows.

A family's module says how its towers' output splits into items; :data:`ITEMS` finds it by ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from services.models.media import Grid, Modality


@dataclass(frozen=True)
class Item:
    """One media item as the encoder half would deliver it.

    Attributes:
        modality: what it is.
        rows: ``[rows, hidden]``, merged into the prompt (cross-attention families: the states its layers attend to).
        grid: as the family's positions need it; ``Grid(1, 1, rows)`` where they need none.
        deepstack: further features ``[rows, hidden]``, added inside the decoder.
        details: what else the merge needs of this item, such as ``second_per_grid`` or ``tiles``.
    """

    modality: Modality
    rows: torch.Tensor
    grid: Grid
    deepstack: tuple[torch.Tensor, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


# (whole model, processor output for one request) -> its items in the order of their placeholders in the prompt
ItemsOf = Callable[[Any, Any], list[Item]]
