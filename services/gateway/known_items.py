"""Media items that an encoder was given lately and should still have, under way or encoded: they cost it nothing again.

A guess for admission: an encoder may have dropped one, and then encodes it once more without anybody having counted on that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from services.gateway.prompt import Item

_MOST = 4096


class KnownItems:
    """The latest ones."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def new(self, items: Iterable[Item]) -> list[Item]:
        """Those that are not known, each once."""
        return list({key: item for item in items if (key := _key(item)) not in self._keys}.values())

    def add(self, items: Iterable[Item]) -> None:
        """They were handed to an encoder."""
        for item in items:
            self._keys[_key(item)] = None
            self._keys.move_to_end(_key(item))
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def forget(self, items: Iterable[Item]) -> None:
        """A request with them failed: the encoder may not have them."""
        for item in items:
            self._keys.pop(_key(item), None)


def _key(item: Item) -> Hashable:
    return item.digest, item.plan, item.cache_salt
