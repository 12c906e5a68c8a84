"""Hands out fixed-size KV blocks. No torch, no grpc, no clock: block ids are plain integers.

A block is free (in ``_free``) or held by one or more block tables (``_references[block] > 0``), never both.
"""

from __future__ import annotations


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


class BlockManager:
    """A pool of ``total`` blocks of ``block_size`` tokens."""

    def __init__(self, total: int, block_size: int) -> None:
        assert total > 0 and block_size > 0
        self.total, self.block_size = total, block_size
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def can_grow(self, table: list[int], tokens: int) -> bool:
        """Whether :meth:`grow` would succeed."""
        return self.blocks_for(tokens) - len(table) <= self.free

    def grow(self, table: list[int], tokens: int) -> None:
        """Extend a block table in place until it holds ``tokens`` tokens.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        if not self.can_grow(table, tokens):
            raise OutOfBlocks
        for _ in range(self.blocks_for(tokens) - len(table)):
            block = self._free.pop()
            self._references[block] = 1
            table.append(block)

    def release(self, table: list[int]) -> None:
        """Give back every block of a table and empty it."""
        for block in reversed(table):
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        table.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that free + used = total and that references equal what ``tables`` hold."""
        held = [0] * self.total
        for table in tables:
            for block in table:
                held[block] += 1
        assert held == self._references, "references differ from the block tables"
        used = sum(1 for count in held if count)
        assert used + self.free == self.total and len(set(self._free)) == self.free, "blocks were lost or doubled"
