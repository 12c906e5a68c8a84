"""The oracle for every family: stock transformers' processor and ``generate()``, and each media item's rows.

A family's module says how its towers' output splits into items; :func:`catalogue` finds it by ``model_type``. A module has
``ITEMS`` and may have ``TAKES`` (which media a family takes: one picture or more where nothing is said) and ``INPUTS``
(``(processor, messages) -> inputs`` for families whose processor does not do it by itself).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
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


@dataclass(frozen=True)
class Takes:
    """Media that a family takes.

    Attributes:
        modalities: kinds of media; none for text families.
        items: most items in one request.
        least: fewest items in one request.
        turns: whether a conversation may have several turns.
    """

    modalities: tuple[Modality, ...] = (Modality.IMAGE,)
    items: int = 3
    least: int = 0
    turns: bool = True


@functools.cache
def catalogue(name: str) -> dict[str, Any]:
    """What all modules of this package say under ``name``: ``ITEMS``, ``TAKES`` or ``INPUTS``."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if not module.name.rpartition(".")[2].startswith("test_"):
            found |= getattr(importlib.import_module(module.name), name, {})
    return found
