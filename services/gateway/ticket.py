"""A request at the gate, and how its waiting can end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.budgets import Prefer, Reservation
from services.gateway.fair_queue import Waiting

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
class Ticket(Waiting):
    """A request at the gate. Only the gate changes it.

    Attributes:
        settle: told once how waiting ended; not told of what :meth:`Gate.enter` raises.
        prefer: the order in which pools are tried.
        queued: whether it had to wait.
        admitted: when it was let in.
        reservation: what it holds, once it is let in.
    """

    settle: Callable[[Outcome], None]
    prefer: Prefer | None = None
    queued: bool = False
    admitted: float = 0.0
    reservation: Reservation | None = None


def as_ticket(waiting: Waiting) -> Ticket:
    """The queue holds nothing else."""
    assert isinstance(waiting, Ticket)
    return waiting
