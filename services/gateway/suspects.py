"""Requests that ran when language models died. One that kills what it runs on must not be carried from server to server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

ENOUGH = 2  # deaths that a request was there for


class Suspects:
    """Counts deaths by request. Knows no clock: times are given.

    Args:
        seconds: a request is held to be innocent when nobody has died of it for so long.
        capacity: requests remembered, the latest ones.
    """

    def __init__(self, seconds: float = 60.0, capacity: int = 1024) -> None:
        self._seconds, self._capacity = seconds, capacity
        self._deaths: OrderedDict[bytes, tuple[float, set[Hashable]]] = OrderedDict()

    def note(self, request: bytes, death: Hashable, now: float) -> None:
        """The request ran on a server that died; ``death`` is the same for all that ran there."""
        _, deaths = self._deaths.pop(request, (now, set()))
        self._deaths[request] = now, deaths | {death}
        if len(self._deaths) > self._capacity:
            self._deaths.popitem(last=False)

    def clear(self, request: bytes) -> None:
        """It was answered."""
        self._deaths.pop(request, None)

    def suspect(self, request: bytes, now: float) -> bool:
        """Whether it should not run again."""
        last, deaths = self._deaths.get(request, (now, set()))
        return len(deaths) >= ENOUGH and now - last < self._seconds
