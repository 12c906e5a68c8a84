"""Where an item's rows lie: one block of memory for all of its features, which processes on this host may map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.shared_memory import Address, Block
from services.models.rows import block_bytes, split_block

SHARED_FROM = 256 * 1024  # bytes; a shared block takes a descriptor, and sending fewer bytes is cheap


class Rows:
    """Room for features of ``rows`` rows each.

    Args:
        rows: of every feature.
        features: elements per row and element type of each.
        shared: whether processes on this host may read it, where it is large enough and the system lets us.

    Attributes:
        features: each [rows, hidden], on the CPU.
        nbytes: memory that they take.
    """

    def __init__(self, rows: int, features: Sequence[tuple[int, torch.dtype]], *, shared: bool) -> None:
        self.nbytes = block_bytes(rows, features)
        mapped = _mapped(self.nbytes) if shared and self.nbytes >= SHARED_FROM else None
        self._block: Block | None
        self._block, memory = mapped or (None, torch.empty(self.nbytes, dtype=torch.uint8))
        self.features = split_block(memory, rows, features)

    @property
    def address(self) -> Address | None:
        """Where others find it; None: nowhere."""
        return None if self._block is None else self._block.address

    def write(self, start: int, features: Sequence[torch.Tensor]) -> None:
        """Copy rows of every feature into their places, from row ``start`` on."""
        for room, rows in zip(self.features, features, strict=True):
            assert start + len(rows) <= len(room), f"rows up to {start + len(rows)} of {len(room)}"
            room[start : start + len(rows)].copy_(rows)

    def close(self) -> None:
        """From here on nobody finds it; who holds it keeps it."""
        if self._block is not None:
            self._block.close()
            self._block = None


def _mapped(nbytes: int) -> tuple[Block, torch.Tensor] | None:
    """A block and its memory; None where the system does not let us: the rows travel as messages then."""
    try:
        block = Block(nbytes)
    except OSError:  # no descriptor is left
        return None
    try:
        return block, torch.from_file(block.path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError:  # /proc is out of reach
        block.close()
        return None
