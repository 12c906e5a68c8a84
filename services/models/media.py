"""Words for media that all services share. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Modality(enum.IntEnum):
    """Kinds of media; the numbers are those of ``triptych.common.v1.Modality``."""

    IMAGE = 1
    AUDIO = 2
    VIDEO = 3

    @property
    def word(self) -> str:
        """As users write it: ``image``."""
        return self.name.lower()


@dataclass(frozen=True)
class Grid:
    """Shape of an item's rows: temporal extent, then height and width in the family's own unit."""

    t: int
    h: int
    w: int


@dataclass(frozen=True)
class ItemPlan:
    """What one media item will cost, known before it is decoded.

    Attributes:
        modality: what the item is.
        rows: embedding rows, each one token of the prompt.
        grid: how the rows are arranged.
        patches: patches that go through the tower.
    """

    modality: Modality
    rows: int
    grid: Grid
    patches: int
