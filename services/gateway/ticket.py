"""A request at the gate, and how its waiting can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.budgets import Prefer, Reservation
from services.gateway.cost import Class, Cost
from services.gateway.tenants import Tenant

Outcome = Reservation | Exception


class Busy(Exception):
    """There is no room, and no use in waiting.

    Attributes:
        reason: QUEUE_FULL, WAIT_TOO_LONG, MEDIA_FULL or TENANT_LIMIT.
        retry_after: seconds after which there may be.
    """

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request at the gate. Only gate and queue change it.

    Attributes:
        deadline: when it is of no use any more, by the caller's clock.
        arrived: when it came.
        number: counts arrivals.
        passed: how many were let in before it that should not count on that; see :mod:`services.gateway.gate`.
        settle: told once how waiting ended; not told of what :meth:`Gate.enter` raises.
        prefer: the order in which pools are tried.
        queued: whether it had to wait.
        admitted: when it was let in.
        reservation: what it holds, once it is let in.
    """

    tenant: Tenant
    kind: Class
    cost: Cost
    priority: int
    deadline: float
    arrived: float
    number: int
    settle: Callable[[Outcome], None]
    passed: int = 0
    prefer: Prefer | None = None
    queued: bool = False
    admitted: float = 0.0
    reservation: Reservation | None = None
