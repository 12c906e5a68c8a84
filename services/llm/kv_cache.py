"""The KV cache of all layer groups: one pool per group, changed together. No torch, no grpc, no clock."""

from __future__ import annotations

import sys

from services.llm.block_manager import BlockManager, BlockTable
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.prefix_cache import PrefixCache
from services.llm.sequence import Sequence, Status


class KvCache:
    """Block tables of sequences over the pools of all groups.

    Attributes:
        pools: one per group.
        prefix: the prefix cache, or None where it is switched off.
    """

    def __init__(
        self, groups: list[LayerGroup], block_size: int, fingerprint: bytes = b"", enable_prefix_caching: bool = True
    ) -> None:
        assert any(group.kind is not Kind.CROSS for group in groups)
        self.groups, self.block_size = groups, block_size
        self.pools = [BlockManager(group.blocks, block_size) for group in groups]
        self.prefix = PrefixCache(groups, self.pools, fingerprint) if enable_prefix_caching else None
        self._each = list(zip(groups, self.pools, strict=True))

    @property
    def queries(self) -> int:
        """Prompt tokens that were looked up in the prefix cache."""
        return self.prefix.queries if self.prefix else 0

    @property
    def hits(self) -> int:
        """How many of them were found."""
        return self.prefix.hits if self.prefix else 0

    def rows(self, group: LayerGroup, sequence: Sequence, tokens: int) -> int:
        """Rows that a group's table has for the first ``tokens`` tokens."""
        if group.kind is Kind.CROSS:
            return sequence.cross_rows
        return sequence.kept(tokens) if group.kind is Kind.PRUNED else tokens

    def fits_ever(self, sequence: Sequence, chunk: int) -> tuple[LayerGroup, int, int] | None:
        """None if the pools can hold a sequence to its last token when it runs alone, in chunks of at most ``chunk``.

        Otherwise a group that cannot, the blocks that it would need and those that it has.
        """
        last = len(sequence.prompt) + sequence.max_tokens - 1  # the last token of the answer is never computed
        for group, needed in zip(self.groups, self.needed(sequence, 0, last, chunk), strict=True):
            if needed > group.blocks:
                return group, needed, group.blocks
        return None

    def needed(self, sequence: Sequence, start: int, tokens: int, chunk: int) -> list[int]:
        """Per group, the most blocks a sequence holds at once on its way from ``start`` to ``tokens`` computed tokens."""
        needed = []
        for group, pool in self._each:
            blocks = pool.blocks_for(self.rows(group, sequence, tokens))
            if group.window is not None:
                blocks -= group.first_read(start) // self.block_size
                blocks = min(blocks, pool.blocks_for(group.window + chunk) + 1)
            needed.append(blocks)
        return needed

    def outstanding(self, sequence: Sequence, chunk: int) -> list[int]:
        """Per group, blocks that a running sequence lacks to compute all tokens that it has."""
        needed = self.needed(sequence, sequence.computed, sequence.length, chunk)
        return [max(0, blocks - table.held) for blocks, table in zip(needed, sequence.tables, strict=True)]

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has ready rows, or can have them behind a prefix: a cheap look before the long one."""
        if sequence.ready_after(0) > 0:
            return True
        return self.prefix is not None and not sequence.cross_rows and self.prefix.may_reach(sequence, sequence.first_missing())

    def longest_prefix(self, sequence: Sequence) -> int:
        """Leading tokens of a waiting sequence that need not be computed."""
        return self.prefix.longest(sequence) if self.prefix else 0

    def fits_now(self, sequence: Sequence, prefix: int, chunk: int, spare: list[int]) -> bool:
        """Whether a waiting sequence with that prefix fits, to its last known token, and leaves ``spare`` blocks per group."""
        needed = self.needed(sequence, prefix, sequence.length, chunk)
        if prefix and self.prefix:
            for index, (_, blocks) in enumerate(self.prefix.blocks(sequence, prefix)):
                needed[index] -= sum(1 for b in blocks if self.pools[index].references(b))
        return all(n + s <= pool.available for n, s, pool in zip(needed, spare, self.pools, strict=True))

    def admit(self, sequence: Sequence, prefix: int) -> None:
        """Give a waiting sequence its tables, with ``prefix`` tokens already in them."""
        assert not sequence.tables
        sequence.tables = [BlockTable() for _ in self.groups]
        sequence.computed = sequence.started = prefix
        sequence.room, sequence.edge, sequence.published = 0, 0, prefix // self.block_size
        if prefix and self.prefix:
            for index, (first, blocks) in enumerate(self.prefix.blocks(sequence, prefix)):
                self.pools[index].adopt(sequence.tables[index], first, blocks)
        if sequence.cached < 0:
            sequence.cached = min(prefix, len(sequence.prompt))
            if self.prefix and sequence.cacheable:
                self.prefix.queries += len(sequence.prompt)
                self.prefix.hits += sequence.cached

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Make place for tokens ``[computed, tokens)`` in every group, written by nobody else; False if nothing was done.

        Blocks behind sliding windows are given back in either case.
        """
        self._free_behind(sequence)
        plan: list[tuple[BlockManager, BlockTable, int, int]] = []
        for (group, pool), table in zip(self._each, sequence.tables, strict=True):
            rows = self.rows(group, sequence, tokens)
            # cross rows are written before a sequence can fork, and never again
            crossed = group.kind is Kind.CROSS
            write = len(table.blocks) if crossed else self.rows(group, sequence, sequence.computed) // self.block_size
            lacking = max(0, pool.blocks_for(rows) - len(table.blocks)) + pool.shared(table, write)
            if lacking > pool.available:
                return False
            plan.append((pool, table, write, rows))
        for pool, table, write, rows in plan:
            pool.make_writable(table, write)
            pool.grow(table, rows)
        sequence.room = self._room(sequence, tokens)
        return True

    def settle(self, sequence: Sequence) -> None:
        """After tokens were computed: offer full blocks to the prefix cache, give back what is behind sliding windows."""
        if self.prefix:
            self.prefix.publish(sequence)
        self._free_behind(sequence)
        sequence.edge = (sequence.computed // self.block_size + 1) * self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give ``child`` tables that share every block of ``parent``; whoever writes first copies."""
        child.tables = [pool.fork(table) for pool, table in zip(self.pools, parent.tables, strict=True)]
        parent.room = child.room = 0

    def release(self, sequence: Sequence, poisoned: bool = False) -> None:
        """Take back a sequence's blocks; what it published can still be found.

        Poisoned: its values are not numbers, so nobody may find the blocks that it alone holds.
        """
        suspect = poisoned or not sequence.output  # a token of the answer proves what it was computed from to be numbers
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if poisoned:
                for block in table.blocks[table.first :]:
                    if pool.references(block) == 1:
                        pool.forget(block)
            pool.release(table, suspect)
        sequence.tables = []
        sequence.computed = sequence.room = sequence.edge = sequence.published = 0

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Copies (group, source, destination) due before the next step: all reads before all writes, or in this order."""
        return [(index, *copy) for index, pool in enumerate(self.pools) for copy in pool.take_copies()]

    def take_stale(self) -> list[tuple[int, int]]:
        """Blocks (group, block) to clear before the next step, after the copies."""
        return [(index, block) for index, pool in enumerate(self.pools) for block in pool.take_stale()]

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that blocks add up in every pool."""
        assert all(len(s.tables) == len(self.groups) and s.status is Status.RUNNING for s in running)
        for index, pool in enumerate(self.pools):
            pool.check_integrity(s.tables[index] for s in running)

    def _room(self, sequence: Sequence, tokens: int) -> int:
        """Tokens that the tables have place for, once they hold ``tokens``."""
        room = sys.maxsize
        for group, table in zip(self.groups, sequence.tables, strict=True):
            place = len(table.blocks) * self.block_size
            if group.kind is Kind.PRUNED and sequence.dropped:
                place = tokens if tokens < len(sequence.prompt) else place + sequence.dropped
            if group.kind is not Kind.CROSS:
                room = min(room, place)
        return room

    def _free_behind(self, sequence: Sequence) -> None:
        for (group, pool), table in zip(self._each, sequence.tables, strict=True):
            if group.window is not None:
                pool.free_behind(table, group.first_read(sequence.computed) // self.block_size, not sequence.output)
