"""What was seen lately of one class of requests: how fast those that waited got in, and how long they then took.

Pure: time is passed in.
"""

from __future__ import annotations

import statistics
from collections import deque

_SEEN = 32


class Pace:
    """Of one class."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_SEEN)
        self._since: float | None = None  # the last one got in, or the first one began to wait; None while nobody waits
        self._took: deque[tuple[int, float]] = deque(maxlen=2 * _SEEN)  # doublings of a price, and seconds
        self._medians: dict[int, float] = {}

    def waits(self, now: float) -> None:
        """One more waits."""
        if self._since is None:
            self._since = now

    def let_in(self, now: float) -> None:
        """One that waited was let in."""
        assert self._since is not None
        self._gaps.append(now - self._since)
        self._since = now

    def emptied(self) -> None:
        """Nobody waits any more."""
        self._since = None

    def seconds_each(self, now: float) -> float | None:
        """Seconds between two that are let in while others wait; None where none was seen.

        A gap that is longer already than usual counts as one, so that a standstill shows.
        """
        if not self._gaps:
            return None
        usual = statistics.fmean(self._gaps)
        running = 0.0 if self._since is None else now - self._since
        return usual if running <= usual else (sum(self._gaps) + running) / (len(self._gaps) + 1)

    def finished(self, price: int, seconds: float) -> None:
        """One was answered, so many seconds after it was let in."""
        self._took.append((price.bit_length(), seconds))
        self._medians.clear()

    @property
    def least(self) -> float:
        """Seconds that the quickest answer seen took; 0 where none was."""
        return min((seconds for _, seconds in self._took), default=0.0)

    def takes(self, price: int) -> float:
        """Seconds that an answer takes: the median of those seen that were of the same magnitude or less; 0 where none was."""
        size = price.bit_length()
        if size not in self._medians:
            seen = [seconds for other, seconds in self._took if other <= size]
            self._medians[size] = statistics.median(seen) if seen else 0.0
        return self._medians[size]
