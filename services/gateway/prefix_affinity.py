"""Which language model has read which beginnings of prompts: a bounded record of what this gateway sent.

Approximate: a server may not have computed yet what it was sent, may have dropped it, or have what another gateway sent. Knows no
prompts, only hashes of them, each over a block of tokens and all blocks before it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

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
        capacity: most blocks remembered of an address; those that were sent longest ago are forgotten first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._read: dict[str, OrderedDict[bytes, None]] = {}  # by address

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many tokens from the prompt's start each address has read; those that have read none are left out."""
        blocks = {address: sum(1 for _ in takewhile(read.__contains__, keys)) for address, read in self._read.items()}
        return {address: count * BLOCK for address, count in blocks.items() if count}

    def note(self, keys: Sequence[bytes], address: str, room: int = 0) -> None:
        """A prompt was sent there. Its first blocks are the last to be forgotten: without them the rest is never found.

        Args:
            room: tokens that the server can hold, prompts and answers together; 0 if it did not say.
        """
        read = self._read.setdefault(address, OrderedDict())
        for key in reversed(keys):
            read[key] = None
            read.move_to_end(key)
        while len(read) > min(self._capacity, room // BLOCK or self._capacity):
            read.popitem(last=False)

    def forget(self, address: str) -> None:
        """Whoever answers there has lost its cache, as after a restart."""
        self._read.pop(address, None)
