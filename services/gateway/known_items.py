"""Media items that an encoder was given lately and should still have, under way or encoded: they cost it nothing again.

A guess for admission: an encoder may have dropped one, and then encodes it once more without anybody having counted on that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

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

    @contextmanager
    def handed_over(self, items: Iterable[Item]) -> Iterator[None]:
        """An encoder gets them meanwhile; if that fails, it may not have them."""
        keys = [_key(item) for item in items]
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)
        try:
            yield
        except BaseException:
            for key in keys:
                self._keys.pop(key, None)
            raise


def _key(item: Item) -> Hashable:
    return item.digest, item.plan, item.cache_salt
