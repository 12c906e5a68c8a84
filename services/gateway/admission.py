"""A ledger of KV blocks: every request reserves its whole life before it starts, or waits its turn.

Knows no gRPC and no models: pools have names, requests have tokens. One event loop owns a ledger.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass


class NeverFits(Exception):
    """The request needs more blocks than any pool has, even when idle."""

    def __init__(self, requested: int, limit: int) -> None:
        super().__init__(f"{requested} blocks needed, the largest pool has {limit}")
        self.requested, self.limit = requested, limit


class QueueFull(Exception):
    """As many requests wait as may wait."""


class NoPool(Exception):
    """No pool is open."""


@dataclass(eq=False)
class Pool:
    """The KV blocks of one language model server; a closed pool takes nothing new."""

    name: str
    total: int
    block_size: int
    reserved: int = 0
    open: bool = True

    @property
    def free(self) -> int:
        """Blocks that may be reserved; negative where the pool shrank under its reservations."""
        return self.total - self.reserved

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(eq=False)
class Reservation:
    """Blocks of one pool, held by one request. Only the ledger changes it."""

    pool: Pool
    blocks: int


Prefer = Callable[[Sequence[Pool]], Sequence[Pool]]  # open pools, the best first; pools that are left out are not taken


def most_free_first(pools: Sequence[Pool]) -> Sequence[Pool]:
    """The order that is taken where a request prefers none."""
    return sorted(pools, key=lambda pool: -pool.free)


class Ledger:
    """Lets requests in while their blocks fit; the others wait first come, first served."""

    def __init__(self, *, max_running: int, max_queued: int) -> None:
        self.max_running, self.max_queued = max_running, max_queued
        self._pools: dict[str, Pool] = {}
        self._held: set[Reservation] = set()
        self._queue: deque[tuple[int, Prefer, asyncio.Future[Reservation]]] = deque()

    @property
    def running(self) -> int:
        """Requests let in and not yet over."""
        return len(self._held)

    @property
    def queued(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    @property
    def reserved_blocks(self) -> int:
        """Blocks held by running requests."""
        return sum(pool.reserved for pool in self._pools.values())

    @property
    def open_pools(self) -> list[Pool]:
        """Pools that take requests."""
        return [pool for pool in self._pools.values() if pool.open]

    def update(self, name: str, *, total: int, block_size: int) -> None:
        """Open a pool, or correct its figures."""
        pool = self._pools.setdefault(name, Pool(name, total, block_size))
        pool.total, pool.block_size, pool.open = total, block_size, True
        self._grant()

    def close(self, name: str) -> None:
        """Let nothing more into a pool; what it holds stays until released."""
        if name in self._pools:
            self._pools[name].open = False
            self._grant()

    @asynccontextmanager
    async def reserve(self, tokens: int, timeout: float, prefer: Prefer = most_free_first) -> AsyncIterator[Reservation]:
        """Hold blocks for ``tokens`` tokens while the context is open.

        Raises:
            NeverFits, QueueFull, NoPool: see there.
            TimeoutError: no room within ``timeout`` seconds.
        """
        reservation = await self._acquire(tokens, timeout, prefer)
        try:
            yield reservation
        finally:
            self._release(reservation)

    def move(self, reservation: Reservation, pool: str) -> None:
        """The request goes on in another pool, whether that has room or not: it takes precedence over whoever comes next."""
        reservation.pool.reserved -= reservation.blocks
        reservation.pool = self._pools[pool]
        reservation.pool.reserved += reservation.blocks
        self._grant()

    async def _acquire(self, tokens: int, timeout: float, prefer: Prefer) -> Reservation:
        pool = self._place(tokens, prefer)
        if pool is not None and not self._queue:
            return self._take(pool, tokens)
        if self.queued >= self.max_queued:
            raise QueueFull
        turn: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, prefer, turn))
        try:
            async with asyncio.timeout(timeout):
                return await turn
        except BaseException:
            if (tokens, prefer, turn) in self._queue:
                self._queue.remove((tokens, prefer, turn))
                self._grant()  # the next one may be smaller
            elif turn.exception() is None:
                self._release(turn.result())  # let in at the very moment of giving up
            raise

    def _place(self, tokens: int, prefer: Prefer) -> Pool | None:
        """The best open pool with room for the request, or None when it has to wait."""
        pools = self.open_pools
        if not pools:
            raise NoPool
        if all(pool.blocks(tokens) > pool.total for pool in pools):
            largest = max(pools, key=lambda pool: pool.total)
            raise NeverFits(largest.blocks(tokens), largest.total)
        if self.running >= self.max_running:
            return None
        return next((pool for pool in prefer(pools) if pool.blocks(tokens) <= pool.free), None)

    def _take(self, pool: Pool, tokens: int) -> Reservation:
        reservation = Reservation(pool, pool.blocks(tokens))
        pool.reserved += reservation.blocks
        self._held.add(reservation)
        return reservation

    def _release(self, reservation: Reservation) -> None:
        self._held.remove(reservation)
        reservation.pool.reserved -= reservation.blocks
        self._grant()

    def _grant(self) -> None:
        """Let in from the head of the queue; the head is never overtaken."""
        while self._queue:
            tokens, prefer, future = self._queue[0]
            if not future.done():
                try:
                    pool = self._place(tokens, prefer)
                except (NeverFits, NoPool) as error:
                    future.set_exception(error)
                else:
                    if pool is None:
                        return
                    future.set_result(self._take(pool, tokens))
            self._queue.popleft()

    def check_integrity(self) -> None:
        """Every block that a pool counts as reserved belongs to a request that holds it."""
        for pool in self._pools.values():
            assert pool.reserved == sum(r.blocks for r in self._held if r.pool is pool), f"{pool} does not match its reservations"
        assert self.running <= self.max_running and self.queued <= self.max_queued
