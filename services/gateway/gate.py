"""Who is let in, who waits and who is refused: the queue's order against the budgets.

Whoever stands first and fits is let in. One that does not fit is passed by those behind it, and by cheaper ones of its tenant,
but at most ``max_passed`` times: passing counts where it can delay, which is when the one let in takes of a budget that the
other waits for, or took its turn although it came later. One that was passed so often is due, and from then on nobody behind it
is given anything of the budgets that it waits for. A short text, which needs no encoder, therefore goes on passing a video
that waits for the encoder alone: it delays nothing.

The queue is bounded. Media may fill three quarters of it, the rest is for text. When it is full, the tenant with most waiting, by
weight, gives up its last one. A request that would wait longer than it has time, by what was seen lately, is refused at once.

Pure: time is passed in, and outcomes are handed to ``settle``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.budgets import Budgets, NeverFits, NoPool
from services.gateway.cost import Class, Cost
from services.gateway.fair_queue import FairQueue
from services.gateway.pace import Pace
from services.gateway.tenants import Tenant
from services.gateway.ticket import Busy, Ticket

_LEAST_COMING = 16  # requests that may be looked at at once, however few may wait
_DOUBT = 1.25  # what a foreseen wait is multiplied by before it is held against a deadline: half of them turn out longer
_UNKNOWN_WAIT = 1.0  # seconds, where nobody who waited was let in lately
_LEAST_WAIT, _LONGEST_WAIT = 0.1, 60.0  # seconds that a refused client is told to wait


@dataclass(frozen=True)
class GateLimits:
    """What the operator allows.

    Attributes:
        max_running: requests answered at once.
        max_queued: requests waiting.
        max_passed: how many may pass a waiting request.
        max_media_bytes: bytes of media of all requests, waiting or running.
        kept_for_text: share of what texts need that requests with media leave to them.
    """

    max_running: int
    max_queued: int
    max_passed: int = 32
    max_media_bytes: int = 1 << 30
    kept_for_text: float = 0.125


@dataclass
class Gate:
    """See the module."""

    limits: GateLimits
    budgets: Budgets = field(init=False)
    queue: FairQueue = field(init=False)
    inside: dict[Ticket, None] = field(default_factory=dict, init=False)  # waiting and running, in order of arrival
    arriving: Counter[tuple[str, Class]] = field(default_factory=Counter, init=False)  # by tenant and class
    paces: dict[Class, Pace] = field(default_factory=lambda: {kind: Pace() for kind in Class}, init=False)

    def __post_init__(self) -> None:
        self.budgets = Budgets(self.limits.max_running, self.limits.kept_for_text)
        self.queue = FairQueue(self.limits.max_passed)

    @property
    def media_bytes(self) -> int:
        """Bytes of media held for requests."""
        return sum(ticket.cost.media_bytes for ticket in self.inside)

    def arrive(self, tenant: Tenant, kind: Class, seconds: float, now: float) -> None:
        """Refuse what would be refused whatever it costs, before anything is known of it. Else it counts as one of those that
        wait until :meth:`arrived`, as looking at more requests than may wait would be work for nothing.

        Raises:
            Busy: see there.
        """
        theirs = sum(ticket.tenant.name == tenant.name for ticket in self.inside)
        theirs += sum(count for (name, _), count in self.arriving.items() if name == tenant.name)
        if tenant.max_requests and theirs >= tenant.max_requests:
            raise self._busy("TENANT_LIMIT", tenant, kind, now)
        busy = bool(self.queue) or self.budgets.full
        for crowd, limit, coming in self._crowds(kind):
            if busy:
                full = len(crowd) + coming >= limit and self._longest([*(w.tenant for w in crowd), tenant]) == tenant.name
            else:
                full = coming >= max(limit, _LEAST_COMING)
            if full:
                raise self._busy("QUEUE_FULL", tenant, kind, now)
        wait = self._wait(tenant, kind, now)
        if busy and wait and _DOUBT * wait + self.paces[kind].least > seconds:
            raise self._busy("WAIT_TOO_LONG", tenant, kind, now)
        self.arriving[tenant.name, kind] += 1

    def arrived(self, tenant: Tenant, kind: Class) -> None:
        """What :meth:`arrive` let through is known, or came to nothing."""
        self.arriving[tenant.name, kind] -= 1
        if not self.arriving[tenant.name, kind]:
            del self.arriving[tenant.name, kind]

    def enter(self, ticket: Ticket, now: float) -> None:
        """Let it in, or have it wait.

        Raises:
            NeverFits: it needs more than there is even when idle.
            NoPool: no pool is open.
            Busy: see there.
        """
        self._check_limits(ticket, now)
        self.budgets.place(ticket.cost, ticket.prefer)  # raises where it can never be let in
        wait = self._wait(ticket.tenant, ticket.kind, now)
        self.inside[ticket] = None
        self.queue.push(ticket)
        self.let_in(now)
        if ticket.reservation is not None or ticket not in self.inside:
            return
        ticket.queued = True
        self.paces[ticket.kind].waits(now)
        if now + _DOUBT * wait + self.paces[ticket.kind].takes(ticket.cost.price) > ticket.deadline:
            raise self._turn_away(ticket, "WAIT_TOO_LONG", now)
        for crowd, limit, _ in self._crowds(ticket.kind):
            if len(crowd) > limit:
                longest = self._longest([waiting.tenant for waiting in crowd])
                last = [waiting for waiting in crowd if waiting.tenant.name == longest][-1]
                refusal = self._turn_away(last, "QUEUE_FULL", now)
                if last is ticket:
                    raise refusal
                last.settle(refusal)
                self.let_in(now)  # it may have kept others back
                break  # one place was missing

    def leave(self, ticket: Ticket, now: float, *, answered: bool = False) -> None:
        """It waits no more, or is over; nothing of it stays. Does no harm when repeated."""
        if ticket not in self.inside:
            return
        if ticket.reservation is None:
            self._drop(ticket)
        else:
            del self.inside[ticket]
            unused = ticket.cost.answers * ticket.cost.answer_tokens - ticket.reservation.completion_tokens
            self.queue.refund(ticket.tenant, max(0, unused))
            self.budgets.give_back(ticket.reservation)
            if answered:
                self.paces[ticket.kind].finished(ticket.cost.price, now - ticket.admitted)
        self.let_in(now)

    def expected_wait(self, tenant: Tenant, kind: Class, cost: Cost, now: float) -> float:
        """Seconds that a request would wait if it came now; 0 where there is room, or no pool at all."""
        try:
            room = not isinstance(self.budgets.place(cost), frozenset)
        except (NoPool, NeverFits):
            return 0.0
        return 0.0 if room and not any(other.kind <= kind for other in self.queue.of(tenant)) else self._told(tenant, kind, now)

    def let_in(self, now: float) -> None:
        """Let in whom there is room for. To be called when a budget grew; everything else here calls it itself."""
        for ticket in self._expired(now):
            self._drop(ticket)
            ticket.settle(TimeoutError("the request's deadline passed while it waited"))
        while self.queue and not self.budgets.full and self._let_one_in(now):
            pass

    def check_integrity(self) -> None:
        """Assert that everybody inside waits or holds, that nobody waits when nothing is held, and that bounds are kept."""
        self.budgets.check_integrity()
        waiting, running = set(self.queue), {ticket for ticket in self.inside if ticket.reservation}
        assert waiting | running == set(self.inside) and not waiting & running
        assert {ticket.reservation for ticket in running} == self.budgets.reservations
        assert running or not waiting, "somebody waits for nothing"
        assert len(running) <= self.limits.max_running and len(waiting) <= self.limits.max_queued
        assert all(other.passed <= self.limits.max_passed for other in waiting)

    def _check_limits(self, ticket: Ticket, now: float) -> None:
        tenant, cost = ticket.tenant, ticket.cost
        theirs = [other for other in self.inside if other.tenant.name == tenant.name]
        if tenant.max_requests and len(theirs) >= tenant.max_requests:
            raise self._busy("TENANT_LIMIT", tenant, ticket.kind, now)
        if tenant.max_tokens and cost.tokens > tenant.max_tokens:
            raise NeverFits("tenant_tokens", cost.tokens, tenant.max_tokens)
        if tenant.max_tokens and sum(other.cost.tokens for other in theirs) + cost.tokens > tenant.max_tokens:
            raise self._busy("TENANT_LIMIT", tenant, ticket.kind, now)
        if cost.media_bytes > self.limits.max_media_bytes:
            raise NeverFits("host_bytes", cost.media_bytes, self.limits.max_media_bytes)
        if cost.media_bytes and self.media_bytes + cost.media_bytes > self.limits.max_media_bytes:
            raise self._busy("MEDIA_FULL", tenant, ticket.kind, now)

    def _let_one_in(self, now: float) -> bool:
        """The first in order that may; False where nobody may."""
        kept: set[str] = set()  # budgets of which those that are due wait for some
        tried: dict[Ticket, frozenset[str]] = {}  # and what they wait for
        for ticket in self.queue.order(now):
            try:
                found = self.budgets.place(ticket.cost, ticket.prefer)
            except (NeverFits, NoPool) as error:
                self._drop(ticket)
                ticket.settle(error)
                return True
            takes = self.budgets.takes(ticket.cost)
            if isinstance(found, frozenset):
                tried[ticket] = found
                kept |= found if self.queue.due(ticket) else set()
            elif takes & kept:
                tried[ticket] = takes & kept
            else:
                self._serve(ticket, tried, takes, now)
                ticket.reservation = self.budgets.take(found, ticket.cost)
                ticket.admitted = now
                ticket.settle(ticket.reservation)
                return True
        return False

    def _serve(self, ticket: Ticket, tried: dict[Ticket, frozenset[str]], takes: frozenset[str], now: float) -> None:
        def passed(other: Ticket) -> bool:
            if other not in tried and (other.tenant.name != ticket.tenant.name or other.number > ticket.number):
                return False
            lacks = tried[other] if other in tried else self._lacks(other)
            return lacks is None or bool(lacks & takes)

        self.queue.serve(ticket, now, passed)
        if ticket.queued:
            self.paces[ticket.kind].let_in(now)
        self._notice_emptied(ticket.kind)

    def _lacks(self, ticket: Ticket) -> frozenset[str] | None:
        """The budgets that it waits for, or None where it waits for its turn alone."""
        try:
            found = self.budgets.place(ticket.cost, ticket.prefer)
        except (NeverFits, NoPool):  # it is about to learn of that
            return frozenset()
        return found if isinstance(found, frozenset) else None

    def _expired(self, now: float) -> list[Ticket]:
        """Those who have no time left, and those who waited until an answer would come too late, by what was seen lately."""

        def too_late(ticket: Ticket) -> bool:
            takes = self.paces[ticket.kind].takes(ticket.cost.price) if ticket.queued else 0.0
            return now + takes >= ticket.deadline

        return [ticket for ticket in self.queue if too_late(ticket)]

    def _drop(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        del self.inside[ticket]
        self._notice_emptied(ticket.kind)

    def _notice_emptied(self, kind: Class) -> None:
        if not any(other.kind is kind for other in self.queue):
            self.paces[kind].emptied()

    def _turn_away(self, ticket: Ticket, reason: str, now: float) -> Busy:
        self._drop(ticket)
        return self._busy(reason, ticket.tenant, ticket.kind, now)

    def _busy(self, reason: str, tenant: Tenant, kind: Class, now: float) -> Busy:
        return Busy(reason, min(max(self._told(tenant, kind, now), _LEAST_WAIT), _LONGEST_WAIT))

    def _told(self, tenant: Tenant, kind: Class, now: float) -> float:
        """The expected wait as clients are told it."""
        each = self.paces[kind].seconds_each(now)
        return _UNKNOWN_WAIT if each is None else self._wait(tenant, kind, now) + each

    def _wait(self, tenant: Tenant, kind: Class, now: float) -> float:
        """Seconds until those of its class and tenant that wait already are let in, by the pace of the class and the tenant's
        share. 0 where nobody waits: one always may, whatever was seen earlier, or nothing newer would ever be seen."""
        ahead = sum(other.kind is kind for other in self.queue.of(tenant)) + self.arriving[tenant.name, kind]
        return ahead * (self.paces[kind].seconds_each(now) or 0.0) / self.queue.share(tenant)

    def _crowds(self, kind: Class) -> list[tuple[list[Ticket], int, int]]:
        """Those that a request of this class competes with for places in the queue, in order of arrival: the media, for one of
        them, and everybody. With the places that there are, and how many are being looked at."""
        limit, everybody = self.limits.max_queued, sorted(self.queue, key=lambda waiting: waiting.number)
        crowds = [(everybody, limit, sum(self.arriving.values()))]
        if kind >= Class.IMAGE:
            media = [waiting for waiting in everybody if waiting.kind >= Class.IMAGE]
            coming = sum(count for (_, other), count in self.arriving.items() if other >= Class.IMAGE)
            crowds.insert(0, (media, limit - limit // 4, coming))
        return crowds

    @staticmethod
    def _longest(tenants: Sequence[Tenant]) -> str:
        """The tenant that stands there most often, for its weight; among equals the last one."""
        counts = Counter(tenant.name for tenant in tenants)
        weights = {tenant.name: tenant.weight for tenant in tenants}
        last = {tenant.name: place for place, tenant in enumerate(tenants)}
        return max(counts, key=lambda name: (counts[name] / weights[name], last[name]))
