"""Hands out fixed-size KV blocks of one pool. No torch, no grpc, no clock: block ids are plain integers.

A block is in exactly one state: free (nobody holds it, nothing in it is worth finding), used (``references > 0``) or
cached (nobody holds it, but it has a key under which it can be found). Used blocks may have a key too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

NO_BLOCK = -1


class OutOfBlocks(Exception):
    """Fewer blocks are available than were asked for."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in one pool, in the order of its rows: row ``i`` is in ``blocks[i // block_size]``.

    Attributes:
        blocks: those given back behind a sliding window are ``NO_BLOCK``.
        first: how many leading entries are ``NO_BLOCK``.
        changed: lowest index whose entry changed since a reader copied the table; the reader sets it to ``len(blocks)``.
    """

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    changed: int = 0

    @property
    def held(self) -> int:
        """Blocks that the table refers to."""
        return len(self.blocks) - self.first


class BlockManager:
    """A pool of ``total`` blocks of ``block_size`` rows.

    A block given back as `suspect` may hold values that are not numbers, which a mask does not hide (0 * NaN is NaN). When
    such a block is handed out again it is listed by :meth:`take_stale`, to be cleared before it is written.
    """

    def __init__(self, total: int, block_size: int) -> None:
        assert total > 0 and block_size > 0
        self.total, self.block_size = total, block_size
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._found: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently given back first
        self._suspect: set[int] = set()
        self._stale: set[int] = set()
        self._copies: dict[int, int] = {}  # destination: source

    @property
    def free(self) -> int:
        """Blocks that nobody holds and nobody can find."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but a key finds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, rows: int) -> int:
        """Blocks that hold this many rows."""
        return -(-rows // self.block_size)

    def references(self, block: int) -> int:
        """Tables that hold a block."""
        return self._references[block]

    def grow(self, table: BlockTable, rows: int) -> None:
        """Extend a table in place until it has place for ``rows`` rows.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        wanted = self.blocks_for(rows) - len(table.blocks)
        if wanted > self.available:
            raise OutOfBlocks
        for _ in range(wanted):
            block = self._take()
            if block in self._suspect:
                self._suspect.discard(block)
                self._stale.add(block)
            table.blocks.append(block)

    def release(self, table: BlockTable, suspect: bool = False) -> None:
        """Give back every block of a table and empty it. Of cached blocks the tail is lost before the head."""
        self._give_back(reversed(table.blocks[table.first :]), suspect)
        table.blocks.clear()
        table.first = table.changed = 0

    def free_behind(self, table: BlockTable, index: int, suspect: bool = False) -> None:
        """Give back the entries below ``index``, which become ``NO_BLOCK``."""
        first = table.first
        index = min(index, len(table.blocks))
        if index <= first:
            return
        self._give_back(table.blocks[first:index], suspect)
        table.blocks[first:index] = [NO_BLOCK] * (index - first)
        table.first, table.changed = index, min(table.changed, first)

    def fork(self, table: BlockTable) -> BlockTable:
        """A table that shares every block of this one."""
        for block in table.blocks[table.first :]:
            self._references[block] += 1
        return BlockTable(table.blocks.copy(), table.first)

    def shared(self, table: BlockTable, index: int) -> bool:
        """Whether :meth:`make_writable` would take a block."""
        return index < len(table.blocks) and self._references[table.blocks[index]] > 1

    def make_writable(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Make sure that nobody else holds an entry; returns the copy (source, destination) that this needs.

        The copy is also listed by :meth:`take_copies`.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        if not self.shared(table, index):
            return None
        if not self.available:
            raise OutOfBlocks
        source = table.blocks[index]
        block = self._take()
        # copies run before clearing, and fill the whole block
        self._suspect.discard(block)
        self._stale.discard(block)
        self._references[source] -= 1
        self._copies.pop(block, None)
        self._copies[block] = source
        table.blocks[index] = block
        table.changed = min(table.changed, index)
        return source, block

    def adopt(self, table: BlockTable, first: int, blocks: list[int]) -> None:
        """Fill an empty table with found blocks, behind ``first`` entries that are not needed."""
        assert not table.blocks
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        table.blocks[:] = [NO_BLOCK] * first + blocks
        table.first, table.changed = first, 0

    def find(self, key: bytes) -> int | None:
        """The block published under a key."""
        return self._found.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full block that somebody holds. If the key is taken the older block keeps it."""
        assert self._references[block] > 0
        if key not in self._found and self._keys[block] is None:
            self._found[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """Let nobody find a block any more."""
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        del self._found[key]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """Whole-block copies (source, destination) since the last call.

        They are due before the next step, before stale blocks are cleared, in this order or with all reads before all
        writes: a source that was given back since may be the destination of a later copy.
        """
        copies = [(source, block) for block, source in self._copies.items()]
        self._copies.clear()
        return copies

    def take_stale(self) -> list[int]:
        """Blocks handed out since the last call that are to be cleared before the next step, after the copies."""
        stale = sorted(self._stale)
        self._stale.clear()
        return stale

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every block is in one state and that references equal what ``tables`` hold."""
        held = [0] * self.total
        for table in tables:
            assert all(b == NO_BLOCK for b in table.blocks[: table.first]) and NO_BLOCK not in table.blocks[table.first :]
            for block in table.blocks[table.first :]:
                held[block] += 1
        assert held == self._references, "references differ from the block tables"
        used = {block for block, count in enumerate(held) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free) and len(used) + len(free) + len(cached) == self.total, "blocks were lost or doubled"
        assert not (used & free or used & cached or free & cached), "a block is in two states"
        assert all(self._keys[b] is None for b in free) and all(self._keys[b] is not None for b in cached)
        assert self._found == {key: b for b, key in enumerate(self._keys) if key is not None}

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key, self._keys[block] = self._keys[block], None
            assert key is not None
            del self._found[key]
        self._references[block] = 1
        return block

    def _give_back(self, blocks: Iterable[int], suspect: bool) -> None:
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if suspect:
                self._suspect.add(block)
            else:
                self._suspect.discard(block)
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
