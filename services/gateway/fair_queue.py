"""Who of those who wait comes next.

Between tenants: deficit round robin. Each round gives every waiting tenant a quantum times its weight of credit, and one with
enough credit for its next request has it served and pays the price. Rounds in which nobody is served are skipped in one go.

Inside a tenant: lower priority numbers first, then cheaper classes, then earlier arrivals. Who has waited AGE_SECONDS counts as
one class cheaper, and so on, until it stands among the cheapest by arrival. Each waiting request counts who passed it; after
``max_passed`` of those it is *due*, and comes before all of its tenant that are not.

Pure: time is passed in. Knows no budgets, so it is told who was passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.gateway.tenants import Tenant
from services.gateway.ticket import Ticket

AGE_SECONDS = 5.0
QUANTUM = 64  # of price in a round, for weight 1; less than most requests cost, so that turns are fine-grained


@dataclass(eq=False)
class _Line:
    """One tenant's waiting requests, in order of arrival, and its credit."""

    tenant: Tenant
    waiting: dict[Ticket, None] = field(default_factory=dict)
    credit: int = 0


class FairQueue:
    """Waiting requests of all tenants.

    Args:
        max_passed: how many may pass a request.
    """

    def __init__(self, max_passed: int) -> None:
        self._max_passed = max_passed
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # tenants that wait, the next in turn first

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line.waiting

    def of(self, tenant: Tenant) -> list[Ticket]:
        """One tenant's, in order of arrival."""
        line = self._lines.get(tenant.name)
        return list(line.waiting) if line else []

    def share(self, tenant: Tenant) -> float:
        """A tenant's part of the turns among those that wait, itself with them."""
        weights = {name: line.tenant.weight for name, line in self._lines.items()} | {tenant.name: tenant.weight}
        return tenant.weight / sum(weights.values())

    def push(self, waiting: Ticket) -> None:
        """Join."""
        self._lines.setdefault(waiting.tenant.name, _Line(waiting.tenant)).waiting[waiting] = None

    def remove(self, waiting: Ticket) -> None:
        """Leave without having been served. Credit ends with a tenant's last request."""
        line = self._lines[waiting.tenant.name]
        del line.waiting[waiting]
        if not line.waiting:
            del self._lines[waiting.tenant.name]

    def due(self, waiting: Ticket) -> bool:
        """Whether nobody may pass it any more."""
        return waiting.passed >= self._max_passed

    def order(self, now: float) -> Iterator[Ticket]:
        """Everybody, the next in turn first."""
        ordered = [self._ordered(line, now) for line in self._lines.values()]
        turns = sorted(zip(self._lines.values(), ordered, strict=True), key=lambda turn: self._rounds(turn[0], turn[1][0]))
        for _, members in turns:
            yield from members

    def serve(self, waiting: Ticket, now: float, passed: Callable[[Ticket], bool]) -> None:
        """It is let in: it pays, and those whom it passes count that."""
        line = self._lines[waiting.tenant.name]
        rounds = self._rounds(line, waiting)
        for other in self._lines.values():
            quantum = QUANTUM * other.tenant.weight
            # a tenant whose request found no room does not save up for more than that one and a round
            most = max(w.cost.price for w in other.waiting) + quantum
            other.credit = max(other.credit, min(other.credit + rounds * quantum, most))
        line.credit -= waiting.cost.price
        del line.waiting[waiting]
        for left in self:
            left.passed += passed(left)
        if not line.waiting:
            del self._lines[waiting.tenant.name]
        elif self._rounds(line, self._ordered(line, now)[0]):
            self._lines.move_to_end(waiting.tenant.name)

    def refund(self, tenant: Tenant, price: int) -> None:
        """A request that was served took so much less than it paid for."""
        if line := self._lines.get(tenant.name):
            line.credit += price

    def _rounds(self, line: _Line, waiting: Ticket) -> int:
        """Rounds until the tenant can pay for it."""
        return max(0, -((line.credit - waiting.cost.price) // (QUANTUM * line.tenant.weight)))

    def _ordered(self, line: _Line, now: float) -> list[Ticket]:
        def rank(waiting: Ticket) -> tuple[int, ...]:
            if self.due(waiting):
                return (0, waiting.number)
            aged = max(0, waiting.kind - int((now - waiting.arrived) / AGE_SECONDS))
            return (1, waiting.priority, aged, waiting.number)

        return sorted(line.waiting, key=rank)
