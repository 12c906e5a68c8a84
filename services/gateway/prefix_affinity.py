"""Which language model has read which beginnings of prompts: a bounded record of what this gateway sent.

Approximate: a server may have dropped what it is thought to have, or have what another gateway sent. Knows no prompts, only
hashes of them, each over a block of tokens and all blocks before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK = 32  # tokens


def chain(token_ids: Sequence[int], media: Iterable[tuple[int, bytes]] = (), salt: str = "") -> list[bytes]:
    """A hash for each full block of a prompt, of it and of all before it.

    Args:
        token_ids: the prompt.
        media: where each run of placeholders starts, and the digest of what it stands for.
        salt: prompts with different salts have nothing in common.
    """
    tokens = array("I", token_ids)
    words = memoryview(tokens).cast("B")
    width = BLOCK * tokens.itemsize
    shown: dict[int, bytes] = {}
    for offset, digest in media:
        shown[offset // BLOCK] = shown.get(offset // BLOCK, b"") + digest
    key, keys = hashlib.blake2b(salt.encode(), digest_size=16).digest(), []
    for block in range(len(tokens) // BLOCK):
        own = words[block * width : (block + 1) * width]
        key = hashlib.blake2b(b"".join((key, own, shown.get(block, b""))), digest_size=16).digest()
        keys.append(key)
    return keys


class PrefixAffinity:
    """The record.

    Args:
        capacity: blocks remembered; those that were sent longest ago are forgotten first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._readers: OrderedDict[bytes, set[str]] = OrderedDict()  # block -> addresses

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._readers)

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many tokens from the prompt's start each address has read; those that have read none are left out."""
        depth: dict[str, int] = {}
        reading: set[str] | None = None
        for at, key in enumerate(keys, start=1):
            readers = self._readers.get(key, set())
            reading = set(readers) if reading is None else reading & readers
            if not reading:
                break
            for address in reading:
                depth[address] = at * BLOCK
        return depth

    def note(self, keys: Sequence[bytes], address: str) -> None:
        """A prompt was sent there. Its first blocks are the last to be forgotten: without them the rest is never found."""
        for key in reversed(keys):
            self._readers.setdefault(key, set()).add(address)
            self._readers.move_to_end(key)
        while len(self._readers) > self._capacity:
            self._readers.popitem(last=False)

    def forget(self, address: str) -> None:
        """Whoever answers there has lost its cache, as after a restart."""
        for key in [key for key, readers in self._readers.items() if address in readers]:
            self._readers[key].discard(address)
            if not self._readers[key]:
                del self._readers[key]
