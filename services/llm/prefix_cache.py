"""Finds keys and values that an earlier sequence left behind. No torch, no grpc, no clock.

Every full block has a key that names all that its keys and values depend on: the key of the block before it, its token
ids, for every media item that it overlaps the item's digest and where the item stands, and for an atom that reaches
beyond the block all of the atom. The first block's predecessor is the root: the model's fingerprint and the salt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from hashlib import blake2b

from services.llm.block_manager import BlockManager
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.sequence import RowSpan, Sequence

KEY_BYTES = 32


class PrefixCache:
    """Keys of sequences, and the longest prefix that every group still holds.

    The cross group takes no part: what it holds is written anew from the encoder's rows.

    Attributes:
        queries: prompt tokens that were looked up, once per sequence.
        hits: how many of them were found.
    """

    def __init__(self, groups: list[LayerGroup], pools: list[BlockManager], fingerprint: bytes) -> None:
        self.block_size = pools[0].block_size
        self.queries = self.hits = 0
        self._fingerprint = fingerprint
        self._groups = [(index, group, pool) for index, (group, pool) in enumerate(zip(groups, pools, strict=True))]
        self._groups = [entry for entry in self._groups if entry[1].kind is not Kind.CROSS]

    def longest(self, sequence: Sequence) -> int:
        """How many leading tokens of a sequence need not be computed, a multiple of the block size.

        At most one less than its length, since the last token yields the logits; never inside an atom. A full group needs
        all blocks before that boundary, a sliding one those that the next token looks back on.
        """
        limit = min(sequence.keyable, sequence.length - 1) // self.block_size
        if not limit:
            return 0
        self.extend_keys(sequence, limit)
        boundaries: list[int] = []
        runs = [0] * len(self._groups)  # blocks found without a gap, up to the present one
        for index in range(limit):
            key, boundary, complete = sequence.keys[index], (index + 1) * self.block_size, True
            for at, (_, group, pool) in enumerate(self._groups):
                runs[at] = runs[at] + 1 if pool.find(key) is not None else 0
                missing = runs[at] < index + 1 - group.first_read(boundary) // self.block_size
                if missing and group.window is None:
                    limit = 0
                complete = complete and not missing
            if not limit:
                break
            if complete:
                boundaries.append(boundary)
        while boundaries and sequence.atom_at(boundaries[-1]):
            boundaries.pop()
        return boundaries[-1] if boundaries else 0

    def may_reach(self, sequence: Sequence, tokens: int) -> bool:
        """Whether anybody left a block that holds token ``tokens - 1``; without it no prefix of that length is found."""
        count = -(-tokens // self.block_size)
        if count * self.block_size > min(sequence.keyable, sequence.length - 1):
            return False
        self.extend_keys(sequence, count)
        _, _, pool = self._groups[0]
        return pool.find(sequence.keys[count - 1]) is not None

    def blocks(self, sequence: Sequence, tokens: int) -> list[tuple[int, list[int]]]:
        """Per group, for a prefix that :meth:`longest` found: entries that are not needed, and the blocks behind them."""
        found = [(0, list[int]())] * (max((i for i, _, _ in self._groups), default=-1) + 1)
        for index, group, pool in self._groups:
            first = group.first_read(tokens) // self.block_size if tokens else 0
            keys = sequence.keys[first : tokens // self.block_size]
            found[index] = first, [pool.find(key) for key in keys]  # type: ignore[misc]
        return found

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks that were computed since the last call."""
        full = min(sequence.computed, sequence.keyable) // self.block_size
        if full <= sequence.published:
            return
        self.extend_keys(sequence, full)
        for index, _, pool in self._groups:
            table = sequence.tables[index]
            for at in range(max(sequence.published, table.first), full):
                pool.publish(table.blocks[at], sequence.keys[at])
        sequence.published = full

    def extend_keys(self, sequence: Sequence, count: int) -> None:
        """Bring ``sequence.keys`` up to ``count`` blocks; all of their tokens must be known."""
        keys, size = sequence.keys, self.block_size
        if len(keys) >= count:
            return
        key = keys[-1] if keys else self._root(sequence.salt)
        atom, atom_key = None, b""
        for start in range(len(keys) * size, count * size, size):
            content = blake2b(key, digest_size=KEY_BYTES)
            _feed(content, sequence, start, start + size)
            if cut := sequence.atom_at(start + size):
                if cut != atom:
                    whole = blake2b(digest_size=KEY_BYTES)
                    _feed(whole, sequence, *cut)
                    atom, atom_key = cut, whole.digest()
                content.update(b"atom" + _numbers(cut[0] - start, cut[1] - start) + atom_key)
            key = content.digest()
            keys.append(key)

    def _root(self, salt: bytes) -> bytes:
        return blake2b(_numbers(len(self._fingerprint)) + self._fingerprint + salt, digest_size=KEY_BYTES).digest()


def _numbers(*values: int) -> bytes:
    return array("q", values).tobytes()


def _feed(content: blake2b, sequence: Sequence, start: int, stop: int) -> None:
    """Token ids ``[start, stop)`` and the media items among them, so that no two contents read the same."""
    content.update(_numbers(stop - start) + array("q", sequence.tokens(start, stop)).tobytes())
    spans = sequence.spans
    if not spans or spans[-1].offset + spans[-1].tokens <= start:
        return
    at = max(0, bisect_right(spans, start, key=_offset) - 1)
    while at < len(spans) and spans[at].offset < stop:
        span = spans[at]
        if span.offset + span.tokens > start:
            content.update(b"item" + _numbers(span.offset - start, span.tokens, span.rows, len(span.digest)) + span.digest)
        at += 1


def _offset(span: RowSpan) -> int:
    return span.offset
