"""Groups of layers that keep keys and values of the same tokens, and so share one block table per sequence. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Which rows a group keeps of a sequence.

    full: one per token. sliding: one per token, of which those behind the window are given back. pruned: one per token
    that was not dropped (FastV). cross: the encoder's rows, written once and read by every token.
    """

    FULL = "full"
    SLIDING = "sliding"
    PRUNED = "pruned"
    CROSS = "cross"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table.

    Attributes:
        blocks: size of the group's own pool.
        window: tokens that a token attends to, itself among them; of sliding groups only.
    """

    kind: Kind
    blocks: int
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.blocks > 0
        assert (self.window is not None) == (self.kind is Kind.SLIDING) and (self.window is None or self.window > 0)

    def first_read(self, computed: int) -> int:
        """The first token that anything from token ``computed`` on attends to."""
        return 0 if self.window is None else max(0, computed - self.window + 1)
