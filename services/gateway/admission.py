"""The ledger: every request reserves what it will take before anything of it is decoded, or waits its turn.

This is :class:`services.gateway.gate.Gate` with a clock, and with tasks that wait. Knows no gRPC and no models: pools have names,
requests have costs. One event loop owns a ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from services.gateway import metrics
from services.gateway.budgets import NeverFits, NoPool, Pool, Prefer, Reservation
from services.gateway.cost import Class, Cost
from services.gateway.gate import Gate, GateLimits
from services.gateway.tenants import EVERYBODY, Tenant
from services.gateway.ticket import Busy, Outcome, Ticket

__all__ = ["Ask", "Busy", "Ledger", "NeverFits", "NoPool", "Pool", "Reservation"]


@dataclass(frozen=True)
class Ask:
    """What a request asks the ledger for.

    Attributes:
        prefer: the order in which pools are tried; by default the one with most free blocks first. Asked again at every try.
    """

    cost: Cost
    kind: Class = Class.SHORT_TEXT
    tenant: Tenant = EVERYBODY
    priority: int = 0
    prefer: Prefer | None = None


class Ledger:
    """Lets requests in while what they need is free."""

    def __init__(self, limits: GateLimits) -> None:
        self.limits = limits
        self.gate = Gate(limits)
        self.refused = 0
        self._arrivals = itertools.count()

    @property
    def running(self) -> int:
        """Requests let in and not yet over."""
        return len(self.gate.budgets.reservations)

    @property
    def queued(self) -> int:
        """Requests waiting."""
        return len(self.gate.queue)

    @property
    def queued_by_class(self) -> Counter[Class]:
        """The same by class."""
        return Counter(waiting.kind for waiting in self.gate.queue)

    @property
    def reserved_blocks(self) -> int:
        """KV blocks held by running requests."""
        return sum(pool.kv_blocks.reserved for pool in self.gate.budgets.pools.values())

    @property
    def open_pools(self) -> list[Pool]:
        """Pools that take requests."""
        return self.gate.budgets.open_pools

    @property
    def reserved(self) -> Counter[str]:
        """What is held of each budget, pools together."""
        held = Counter({budget.name: 0 for budget in self.gate.budgets})
        for budget in self.gate.budgets:
            held[budget.name] += budget.reserved
        held["host_bytes"] = self.gate.media_bytes
        return held

    @property
    def limit(self) -> Counter[str]:
        """How much there is of each, closed pools left out; what nobody published is missing."""
        limits = Counter({"host_bytes": self.limits.max_media_bytes})
        closed = {id(budget) for pool in self.gate.budgets.pools.values() if not pool.open for budget in pool.budgets}
        for budget in self.gate.budgets:
            if budget.limit is not None and id(budget) not in closed:
                limits[budget.name] += budget.limit
        return limits

    def update(self, name: str, *, total: int, block_size: int, batch_tokens: int = 0, max_sequences: int = 0) -> None:
        """Open a pool, or correct its figures: KV blocks and their size, tokens and sequences of a step (0: not published)."""
        figures = {"total": total, "block_size": block_size, "batch_tokens": batch_tokens, "max_sequences": max_sequences}
        self.gate.budgets.update_pool(name, **figures)
        self.gate.let_in(time.monotonic())

    def update_encoders(self, *, batch_patches: int = 0, max_items: int = 0, max_bytes: int = 0) -> None:
        """Correct what all encoders take together (0: not published)."""
        self.gate.budgets.update_encoders(batch_patches=batch_patches, max_items=max_items, max_bytes=max_bytes)
        self.gate.let_in(time.monotonic())

    def close(self, name: str) -> None:
        """Let nothing more into a pool; what it holds stays until released."""
        self.gate.budgets.close_pool(name)
        self.gate.let_in(time.monotonic())

    @contextmanager
    def arriving(self, tenant: Tenant, kind: Class, timeout: float) -> Iterator[None]:
        """While it is found out what a request asks for; refuses at once what would be refused whatever that is.

        Raises:
            Busy: see there.
        """
        with self._counting(Busy):
            self.gate.arrive(tenant, kind, timeout, time.monotonic())
        try:
            yield
        finally:
            self.gate.arrived(tenant, kind)

    def expected_wait(self, ask: Ask) -> float:
        """Seconds that it would wait if it came now."""
        return self.gate.expected_wait(ask.tenant, ask.kind, ask.cost, time.monotonic())

    @asynccontextmanager
    async def reserve(self, ask: Ask, timeout: float) -> AsyncIterator[Reservation]:
        """Hold what the request takes while the context is open.

        Raises:
            NeverFits, Busy, NoPool: see there.
            TimeoutError: no room within ``timeout`` seconds.
        """
        now = time.monotonic()
        turn: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            tenant=ask.tenant, kind=ask.kind, cost=ask.cost, priority=ask.priority, deadline=now + timeout, arrived=now,
            number=next(self._arrivals), settle=lambda outcome: _resolve(turn, outcome), prefer=ask.prefer,
        )  # fmt: skip
        answered = False
        try:
            with self._counting(Busy, TimeoutError):
                self.gate.enter(ticket, now)
                async with asyncio.timeout(timeout):
                    reservation = await turn
            metrics.admitted.labels(ask.kind.word).inc()
            metrics.wait_seconds.labels(ask.kind.word).observe(ticket.admitted - now)
            yield reservation
            answered = True
        finally:
            self.gate.leave(ticket, time.monotonic(), answered=answered)

    def flowed(self, reservation: Reservation) -> None:
        """Its media are encoded and its prompt is computed: what the two took may be used by others. May be repeated."""
        self.gate.budgets.flowed(reservation)
        self.gate.let_in(time.monotonic())

    def move(self, reservation: Reservation, pool: str) -> None:
        """The request goes on in another pool."""
        self.gate.budgets.move(reservation, pool)
        self.gate.let_in(time.monotonic())

    def check_integrity(self) -> None:
        """Everything counted as reserved belongs to a request that holds it, and nobody waits for nothing."""
        self.gate.check_integrity()

    @contextmanager
    def _counting(self, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            self.refused += isinstance(error, Busy)
            metrics.refused.labels(error.reason.lower() if isinstance(error, Busy) else "deadline").inc()
            raise


def _resolve(turn: asyncio.Future[Reservation], outcome: Outcome) -> None:
    if turn.done():  # its task was cancelled and gives back what it holds
        return
    if isinstance(outcome, Reservation):
        turn.set_result(outcome)
    else:
        turn.set_exception(outcome)
