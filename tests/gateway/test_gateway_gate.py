"""Budgets, the fair queue and the gate between them: rules, then a machine that does everything in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.budgets import BATCHES_AHEAD, NeverFits, NoPool, Reservation
from services.gateway.cost import Class, Cost, kind_of
from services.gateway.fair_queue import AGE_SECONDS, QUANTUM
from services.gateway.gate import Gate, GateLimits
from services.gateway.tenants import EVERYBODY, Tenant
from services.gateway.ticket import Busy, Outcome, Ticket
from services.models.media import Modality

A, B = Tenant("a"), Tenant("b")
BATCH = 100  # patches


class Desk:
    """A gate with one pool, requests by name, and a clock that stands still unless told otherwise."""

    def __init__(self, blocks: int = 100, *, encoders: bool = True, **limits: int) -> None:
        self.gate = Gate(GateLimits(**{"max_running": 1000, "max_queued": 1000, "max_passed": 4} | limits))
        self.gate.budgets.update_pool("llm", total=blocks, block_size=1)
        if encoders:
            self.gate.budgets.update_encoders(batch_patches=BATCH // BATCHES_AHEAD, max_items=0, max_bytes=0)
        self.now = 0.0
        self.outcomes: dict[str, Outcome] = {}
        self.tickets: dict[str, Ticket] = {}

    def ask(
        self, name: str, tokens: int = 1, *, patches: int = 0, kind: Class | None = None, tenant: Tenant = EVERYBODY,
        priority: int = 0, seconds: float = 1e9, media_bytes: int = 0,
    ) -> bool:  # fmt: skip
        """Whether it was let in at once."""
        cost = Cost(tokens, 0, encoder_patches=patches, encoder_items=int(patches > 0), media_bytes=media_bytes)
        kind = kind or (Class.RECORDING if patches else Class.SHORT_TEXT)
        ticket = Ticket(
            tenant=tenant, kind=kind, cost=cost, priority=priority, deadline=self.now + seconds, arrived=self.now,
            number=len(self.tickets), settle=lambda outcome: self.outcomes.update({name: outcome}),
        )  # fmt: skip
        self.tickets[name] = ticket
        self.gate.enter(ticket, self.now)
        return ticket.reservation is not None

    def arrive(self, tenant: Tenant, kind: Class, seconds: float, now: float) -> None:
        """It arrives and is known at once."""
        self.gate.arrive(tenant, kind, seconds, now)
        self.gate.arrived(tenant, kind)

    def end(self, name: str, *, answered: bool = True) -> list[str]:
        """Who was let in thereby."""
        before = set(self.running)
        self.gate.leave(self.tickets[name], self.now, answered=answered)
        self.gate.check_integrity()
        return [other for other in self.running if other not in before]

    @property
    def running(self) -> list[str]:
        """In the order in which they were let in."""
        return [name for name in self.outcomes if self.tickets[name].reservation and self.tickets[name] in self.gate.inside]

    def drained(self) -> list[str]:
        """Everybody in the order in which they are let in, when whoever runs longest ends again and again."""
        order = []
        while self.running:
            order.append(self.running[0])
            self.end(order[-1])
        assert not self.gate.inside and not any(budget.reserved for budget in self.gate.budgets)
        return order


def test_a_cost_in_blocks() -> None:
    assert [Cost(17, 15).blocks(16), Cost(17, 16).blocks(16), Cost(16, 0).blocks(16)] == [2, 3, 1]
    assert Cost(35, 10, answers=3).blocks(16) == 2 + 3  # three answers share the two full blocks
    assert Cost(35, 10, answers=3).tokens == 65
    assert [Cost(n, 1, cached_tokens={"x": 32}).prefill_tokens(llm) for n in (35, 32) for llm in "xy"] == [3, 35, 1, 32]


@pytest.mark.parametrize(
    ("tokens", "modalities", "kind"),
    [
        (2048, set(), Class.SHORT_TEXT),
        (2049, set(), Class.LONG_TEXT),
        (1, {Modality.IMAGE}, Class.IMAGE),
        (1, {Modality.IMAGE, Modality.AUDIO}, Class.RECORDING),
        (1, {Modality.VIDEO}, Class.RECORDING),
    ],
)
def test_classes(tokens: int, modalities: set[Modality], kind: Class) -> None:
    assert kind_of(tokens, modalities) is kind


def test_what_flows_is_given_back_early_and_the_rest_at_the_end() -> None:
    desk = Desk()
    assert desk.ask("a", 10, patches=80) and not desk.ask("b", 10, patches=30)
    reservation = desk.tickets["a"].reservation
    assert reservation is not None and reservation.blocks == 10
    desk.gate.budgets.flowed(reservation)
    desk.gate.let_in(0)
    assert desk.running == ["a", "b"] and desk.gate.budgets.pools["llm"].free == 80
    desk.gate.budgets.flowed(reservation)  # again: of no effect
    desk.gate.check_integrity()
    assert desk.drained() == ["a", "b"]


def test_more_than_all_that_flows_runs_alone_and_more_than_all_that_stays_never() -> None:
    desk = Desk()
    assert desk.ask("vast", patches=10 * BATCH) and not desk.ask("small", patches=1)
    assert desk.end("vast") == ["small"]
    with pytest.raises(NeverFits) as never:
        desk.ask("long", 101)
    assert (never.value.budget, never.value.requested, never.value.limit) == ("kv_blocks", 101, 100)
    desk.gate.budgets.update_encoders(batch_patches=0, max_items=0, max_bytes=1000)
    with pytest.raises(NeverFits) as never:
        desk.ask("heavy", media_bytes=1001)
    assert (never.value.budget, never.value.limit) == ("encoder_bytes", 1000)
    desk.gate.budgets.close_pool("llm")
    with pytest.raises(NoPool):
        desk.ask("late")
    desk.drained()


def test_media_are_counted_while_they_wait() -> None:
    desk = Desk(max_media_bytes=100)
    assert desk.ask("a", 100, media_bytes=50) and not desk.ask("b", 1, media_bytes=40)
    with pytest.raises(Busy) as busy:
        desk.ask("c", 1, media_bytes=11)
    assert busy.value.reason == "MEDIA_FULL"
    with pytest.raises(NeverFits) as never:
        desk.ask("c", 1, media_bytes=101)
    assert never.value.budget == "host_bytes"
    desk.ask("d", 1, media_bytes=10)
    desk.drained()


def test_a_request_moves_to_another_pool_whether_it_has_room_or_not() -> None:
    desk = Desk(10)
    desk.ask("a", 8)
    desk.gate.budgets.update_pool("other", total=10, block_size=2)
    desk.ask("b", 20)
    moved = desk.tickets["a"].reservation
    assert moved is not None
    desk.gate.budgets.move(moved, "other")
    desk.gate.check_integrity()
    assert (moved.pool.name, moved.blocks, moved.pool.free, desk.gate.budgets.pools["llm"].free) == ("other", 4, -4, 10)
    assert desk.ask("c", 10)
    assert sorted(desk.drained()) == ["a", "b", "c"]


def test_what_a_language_model_has_is_no_prefill_there_and_elsewhere_it_is() -> None:
    budgets = Desk(10).gate.budgets
    for name in ("has", "other"):
        budgets.update_pool(name, total=1000, block_size=16, batch_tokens=64)  # 256 tokens ahead
    cost, first = Cost(200, 8, cached_tokens={"has": 192}), lambda pools: [budgets.pools["has"]]
    held = [budgets.take(budgets.pools["has"], cost) for _ in range(32)]
    assert budgets.place(cost, first) == frozenset({"prefill_tokens"}) and not budgets.pools["has"].prefill_tokens.free
    budgets.move(held[0], "other")
    assert (budgets.pools["has"].prefill_tokens.reserved, budgets.pools["other"].prefill_tokens.reserved) == (31 * 8, 200)
    for reservation in held:
        budgets.flowed(reservation)
        budgets.give_back(reservation)
    budgets.check_integrity()
    assert not any(budget.reserved for budget in budgets)


def test_pools_in_the_order_that_a_request_prefers() -> None:
    desk = Desk(10)
    desk.gate.budgets.update_pool("larger", total=20, block_size=1)
    place = desk.gate.budgets.place
    found = [
        place(Cost(5, 0)),
        place(Cost(5, 0), lambda pools: sorted(pools, key=lambda pool: pool.total)),
        place(Cost(15, 0), lambda pools: sorted(pools, key=lambda pool: pool.total)),
        place(Cost(5, 0), lambda pools: []),
    ]
    assert [getattr(pool, "name", pool) for pool in found] == ["larger", "llm", "larger", frozenset()]


def test_texts_pass_a_video_but_only_so_often() -> None:
    """All of them need blocks: those that the video waits for."""
    desk = Desk(10)
    desk.ask("first", 10)
    desk.ask("video", 10, kind=Class.RECORDING)
    for i in range(6):
        desk.ask(f"text{i}", 10)
    assert desk.drained() == ["first", "text0", "text1", "text2", "text3", "video", "text4", "text5"]


def test_small_ones_pass_one_that_does_not_fit_but_only_so_often() -> None:
    desk = Desk(10)
    desk.ask("first", 6)
    desk.ask("large", 10)
    assert [desk.ask(f"small{i}", 1) for i in range(5)] == [True, True, True, True, False]
    assert desk.tickets["large"].passed == 4
    for name in ("small0", "small1", "small2", "small3"):
        assert not desk.end(name)  # there is room for small4, but it would be taken from the large one
    assert desk.end("first") == ["large"]
    assert desk.drained() == ["large", "small4"]


def test_texts_go_on_passing_a_video_that_waits_for_the_encoder_alone() -> None:
    desk = Desk()
    desk.ask("first", patches=BATCH)
    desk.ask("video", patches=BATCH)
    assert all(desk.ask(f"text{i}") for i in range(20))
    assert desk.tickets["video"].passed == 0
    assert [desk.ask("picture", patches=1), desk.end("first")] == [False, ["video"]]
    desk.drained()


def test_media_leave_a_share_to_texts_unless_they_need_all() -> None:
    desk = Desk(80)
    desk.gate.budgets.update_pool("llm", total=80, block_size=1, max_sequences=8)
    for i in range(8):
        desk.ask(f"video{i}", patches=1)
    assert len(desk.running) == 7 and [desk.ask(f"text{i}") for i in range(4)] == [True, True, True, False]
    assert len(desk.drained()) == 12
    assert desk.ask("video", 70, patches=1) and not desk.ask("picture", 1, patches=1) and desk.ask("text", 10)
    desk.drained()
    assert desk.ask("vast", 80, patches=1)
    desk.drained()


def test_waiting_makes_up_for_a_class() -> None:
    desk = Desk(10)
    desk.ask("first", 10)
    desk.ask("video", 10, kind=Class.RECORDING)
    desk.now = 2 * AGE_SECONDS
    desk.ask("text", 10)
    desk.ask("long", 10, kind=Class.LONG_TEXT)
    assert desk.end("first") == ["text"]
    assert desk.end("text") == ["video"]  # as old as to be a long text, and there before that
    desk.drained()


def test_priorities_within_a_tenant() -> None:
    desk = Desk(QUANTUM)
    desk.ask("first", QUANTUM)
    for name, priority in (("c", 5), ("b", 0), ("a", -5), ("d", 5)):
        desk.ask(name, QUANTUM, priority=priority)
    desk.ask("other tenant's", QUANTUM, priority=99, tenant=B)
    assert desk.drained() == ["first", "a", "other tenant's", "b", "c", "d"]


def test_tenants_take_turns_by_weight_and_price() -> None:
    desk = Desk(QUANTUM)
    heavy = Tenant("heavy", weight=3)
    desk.ask("first", QUANTUM)
    for i in range(12):
        desk.ask(f"a{i}", QUANTUM, tenant=A)
    for i in range(12):
        desk.ask(f"h{i}", QUANTUM, tenant=heavy)
    order = desk.drained()[1:]
    assert Counter(name[0] for name in order[:12]) == {"h": 9, "a": 3}


def test_who_asks_for_more_has_fewer_turns() -> None:
    desk = Desk(QUANTUM, encoders=False)
    desk.ask("first", QUANTUM)
    for i in range(12):
        desk.ask(f"cheap{i}", QUANTUM, tenant=A)
        desk.ask(f"dear{i}", QUANTUM, patches=3 * QUANTUM, tenant=B)
    assert Counter(name.rstrip("0123456789") for name in desk.drained()[1:11]) == {"cheap": 8, "dear": 2}


def test_a_flood_of_one_tenant_takes_no_turn_of_another() -> None:
    desk = Desk(QUANTUM, max_queued=8)
    desk.ask("first", QUANTUM, tenant=A)
    for i in range(8):
        desk.ask(f"a{i}", QUANTUM, tenant=A)
    with pytest.raises(Busy):
        desk.ask("too many", tenant=A)
    desk.arrive(B, Class.SHORT_TEXT, 60, 0)
    assert not desk.ask("b", QUANTUM, tenant=B)  # in place of the flood's last one
    refusal = desk.outcomes["a7"]
    assert isinstance(refusal, Busy) and refusal.reason == "QUEUE_FULL" and len(desk.gate.queue) == 8
    assert desk.drained()[:3] in (["first", "a0", "b"], ["first", "b", "a0"])


def test_media_leave_a_quarter_of_the_queue_to_texts() -> None:
    desk = Desk(1, max_queued=8)
    desk.ask("first")
    for i in range(6):
        desk.ask(f"video{i}", kind=Class.RECORDING)
    for attempt in (lambda: desk.arrive(EVERYBODY, Class.IMAGE, 60, 0), lambda: desk.ask("image", kind=Class.IMAGE)):
        with pytest.raises(Busy):
            attempt()
    desk.arrive(EVERYBODY, Class.SHORT_TEXT, 60, 0)
    for i in range(2):
        desk.ask(f"text{i}")
    with pytest.raises(Busy):
        desk.arrive(EVERYBODY, Class.SHORT_TEXT, 60, 0)
    desk.drained()


def test_no_more_are_looked_at_than_may_wait() -> None:
    desk = Desk(1, max_queued=40)
    for _ in range(30):
        desk.gate.arrive(EVERYBODY, Class.IMAGE, 60, 0)
    with pytest.raises(Busy):
        desk.gate.arrive(EVERYBODY, Class.RECORDING, 60, 0)
    for _ in range(10):
        desk.gate.arrive(EVERYBODY, Class.SHORT_TEXT, 60, 0)
    with pytest.raises(Busy):
        desk.gate.arrive(EVERYBODY, Class.LONG_TEXT, 60, 0)
    desk.gate.arrived(EVERYBODY, Class.IMAGE)
    desk.gate.arrive(EVERYBODY, Class.LONG_TEXT, 60, 0)
    desk.ask("running")
    with pytest.raises(Busy):
        desk.gate.arrive(EVERYBODY, Class.LONG_TEXT, 60, 0)
    desk.drained()


def test_limits_of_a_tenant() -> None:
    desk = Desk(10)
    tenant = Tenant("t", max_requests=2, max_tokens=8)
    with pytest.raises(NeverFits) as never:
        desk.ask("large", 9, tenant=tenant)
    assert (never.value.budget, never.value.limit) == ("tenant_tokens", 8)
    desk.ask("blocker", 9)
    desk.ask("a", 4, tenant=tenant)
    with pytest.raises(Busy) as busy:
        desk.ask("b", 5, tenant=tenant)
    assert busy.value.reason == "TENANT_LIMIT"
    desk.ask("c", 4, tenant=tenant)
    for attempt in (lambda: desk.arrive(tenant, Class.IMAGE, 60, 0), lambda: desk.ask("d", 1, tenant=tenant)):
        with pytest.raises(Busy):
            attempt()
    assert desk.ask("somebody else's", 1)
    desk.drained()


def test_what_was_not_used_of_an_answer_is_credited() -> None:
    desk = Desk(10)
    desk.ask("first", 10, tenant=A)
    desk.ask("a", 10, tenant=A)
    reservation = desk.tickets["first"].reservation
    assert reservation is not None
    desk.tickets["first"].cost = Cost(4, 6)
    reservation.completion_tokens = 2
    line = desk.gate.queue._lines["a"]
    before = line.credit
    desk.gate.queue.refund(A, 0)
    desk.ask("b", 10, tenant=A)
    desk.end("first")
    assert desk.gate.queue._lines["a"].credit == before + 4 + QUANTUM - 10
    desk.drained()


def test_expired_work_is_dropped_unserved() -> None:
    desk = Desk(1)
    desk.ask("first")
    desk.ask("impatient", seconds=2)
    desk.ask("patient", seconds=20)
    desk.now = 3
    assert desk.end("first") == ["patient"]
    assert isinstance(desk.outcomes["impatient"], TimeoutError)
    desk.now = 8  # an answer takes 5 s or so
    desk.end("patient")
    desk.ask("second")
    with pytest.raises(Busy) as busy:
        desk.ask("hopeless", seconds=3)
    assert busy.value.reason == "WAIT_TOO_LONG"
    desk.ask("in time", seconds=10)
    desk.now = 14
    assert desk.end("second") == []
    assert isinstance(desk.outcomes["in time"], TimeoutError)
    desk.drained()


def test_the_pace_tells_how_long_waiting_takes() -> None:
    desk = Desk(1)
    assert desk.gate.expected_wait(EVERYBODY, Class.SHORT_TEXT, Cost(1, 0), 0) == 0
    for i in range(10):
        desk.ask(f"{i}")
    assert desk.gate.expected_wait(EVERYBODY, Class.SHORT_TEXT, Cost(1, 0), 0) == 1  # nothing is known yet
    for i in range(5):
        desk.now += 2
        desk.end(f"{i}")
    assert len(desk.gate.queue) == 4
    expect = lambda: desk.gate.expected_wait(EVERYBODY, Class.SHORT_TEXT, Cost(1, 0), desk.now)  # noqa: E731
    assert expect() == 10
    with pytest.raises(Busy) as busy:
        desk.arrive(
            EVERYBODY, Class.SHORT_TEXT, 11.9, desk.now
        )  # 8 s of waiting and a quarter, 2 s that the quickest answer took
    assert busy.value.reason == "WAIT_TOO_LONG" and busy.value.retry_after == 10
    desk.arrive(EVERYBODY, Class.SHORT_TEXT, 12, desk.now)
    desk.arrive(EVERYBODY, Class.RECORDING, 1, desk.now)  # none of those was seen: one may wait
    desk.now += 100
    assert expect() > 80  # it stands still
    desk.drained()
    assert expect() == 0


TENANTS = [EVERYBODY, Tenant("heavy", weight=4), Tenant("bounded", max_requests=3, max_tokens=60)]


class GateMachine(RuleBasedStateMachine):
    """Everything that may happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(GateLimits(max_running=5, max_queued=8, max_passed=3, max_media_bytes=100))
        self.now, self.arrivals = 0.0, 0
        self.told: dict[Ticket, list[Outcome]] = {}
        self.overtaken: Counter[Ticket] = Counter()
        self.seen: set[Ticket] = set()

    @initialize()
    def open(self) -> None:
        self.resize(20, 8, 2)

    @rule(total=st.integers(1, 40), batch=st.integers(0, 10), sequences=st.integers(0, 4), name=st.sampled_from("xy"))
    def resize(self, total: int, batch: int, sequences: int, name: str = "x") -> None:
        self.gate.budgets.update_pool(name, total=total, block_size=2, batch_tokens=batch, max_sequences=sequences)
        self.let_in()

    @rule(patches=st.integers(0, 10), items=st.integers(0, 3), size=st.integers(0, 60))
    def resize_encoders(self, patches: int, items: int, size: int) -> None:
        self.gate.budgets.update_encoders(batch_patches=patches, max_items=items, max_bytes=size)
        self.let_in()

    @rule(name=st.sampled_from("xy"))
    def close(self, name: str) -> None:
        self.gate.budgets.close_pool(name)
        self.let_in()

    @rule(
        tenant=st.sampled_from(TENANTS), kind=st.sampled_from(Class), tokens=st.integers(1, 24), answer=st.integers(0, 8),
        answers=st.integers(1, 2), cached=st.dictionaries(st.sampled_from("xy"), st.integers(0, 24)), patches=st.integers(0, 60),
        media_bytes=st.integers(0, 40), priority=st.integers(-1, 1), seconds=st.sampled_from([1.0, 10.0, 1e6]),
        prefer=st.booleans(),
    )  # fmt: skip
    def ask(self, tenant: Tenant, kind: Class, priority: int, seconds: float, prefer: bool, **figures: Any) -> None:
        media = kind >= Class.IMAGE
        cost = Cost(
            figures["tokens"], figures["answer"], figures["answers"], figures["cached"],
            encoder_patches=media * figures["patches"], encoder_items=int(media), media_bytes=media * figures["media_bytes"],
        )  # fmt: skip
        outcomes: list[Outcome] = []
        ticket = Ticket(
            tenant=tenant, kind=kind, cost=cost, priority=priority, deadline=self.now + seconds, arrived=self.now,
            number=self.arrivals, settle=outcomes.append, prefer=(lambda pools: list(pools)[::-1]) if prefer else None,
        )  # fmt: skip
        self.arrivals += 1
        self.told[ticket] = outcomes
        self.watch(lambda: self.enter(ticket))

    def enter(self, ticket: Ticket) -> None:
        try:
            self.gate.arrive(ticket.tenant, ticket.kind, ticket.deadline - self.now, self.now)
            self.gate.arrived(ticket.tenant, ticket.kind)
            self.gate.enter(ticket, self.now)
        except (Busy, NeverFits, NoPool):
            assert ticket not in self.gate.inside and not self.told.pop(ticket)

    @rule(tenant=st.sampled_from(TENANTS[:2]), count=st.integers(1, 8), kind=st.sampled_from([Class.SHORT_TEXT, Class.LONG_TEXT]))
    def stream(self, tenant: Tenant, count: int, kind: Class) -> None:
        """Small texts, each of which comes as an earlier one ends: what may pass a large request again and again."""
        for _ in range(count):
            self.ask(
                tenant=tenant, kind=kind, tokens=2, answer=0, answers=1, cached={}, patches=0, media_bytes=0, priority=0,
                seconds=1e6, prefer=False,
            )  # fmt: skip
            small = [ticket for ticket in self.gate.inside if ticket.reservation and ticket.cost.tokens <= 2]
            if len(small) > 1:
                self.watch(lambda: self.gate.leave(small[0], self.now, answered=True))  # noqa: B023
                self.gate.check_integrity()

    @precondition(lambda self: self.gate.inside)
    @rule(which=st.integers(0, 100), answered=st.booleans(), used=st.integers(0, 40))
    def leave(self, which: int, answered: bool, used: int) -> None:
        """Cancelled while it waits; or failed or finished."""
        ticket = list(self.gate.inside)[which % len(self.gate.inside)]
        if ticket.reservation:
            ticket.reservation.completion_tokens = used
        self.watch(lambda: self.gate.leave(ticket, self.now, answered=answered))
        self.gate.leave(ticket, self.now)  # again: of no effect

    @precondition(lambda self: self.gate.budgets.reservations)
    @rule(which=st.integers(0, 100))
    def flow(self, which: int) -> None:
        self.gate.budgets.flowed(self.holder(which))
        self.let_in()

    @precondition(lambda self: self.gate.budgets.reservations)
    @rule(which=st.integers(0, 100), name=st.sampled_from("xy"))
    def move(self, which: int, name: str) -> None:
        if name in self.gate.budgets.pools:
            self.gate.budgets.move(self.holder(which), name)
            self.let_in()

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.let_in()

    def holder(self, which: int) -> Reservation:
        running = [ticket.reservation for ticket in self.gate.inside if ticket.reservation]
        return running[which % len(running)]

    def let_in(self) -> None:
        self.watch(lambda: self.gate.let_in(self.now))

    def watch(self, act: Callable[[], object]) -> None:
        """Do it, and count who passed which text of its tenant, by arrivals and grants alone: all take of what texts wait for."""
        waiting = set(self.gate.queue)
        act()
        let_in = {ticket for ticket in self.told if ticket.reservation} - self.seen
        self.seen |= let_in
        for text in waiting & set(self.gate.queue):
            later = sum(other.tenant == text.tenant and other.number > text.number for other in let_in)
            self.overtaken[text] += later if text.kind < Class.IMAGE else 0
            assert self.overtaken[text] <= self.gate.limits.max_passed

    @invariant()
    def everything_adds_up(self) -> None:
        self.gate.check_integrity()

    @invariant()
    def everybody_is_told_once(self) -> None:
        for ticket, outcomes in self.told.items():
            waits = ticket in self.gate.inside and not ticket.reservation
            assert len(outcomes) <= 1 and not (waits and outcomes)
            if outcomes and isinstance(outcomes[0], Reservation):
                assert outcomes[0] is ticket.reservation

    @invariant()
    def limits_of_tenants_hold(self) -> None:
        for tenant in TENANTS:
            theirs = [ticket for ticket in self.gate.inside if ticket.tenant == tenant]
            assert not tenant.max_requests or len(theirs) <= tenant.max_requests
            assert not tenant.max_tokens or sum(ticket.cost.tokens for ticket in theirs) <= tenant.max_tokens
        assert self.gate.media_bytes <= 100

    def teardown(self) -> None:
        """Whoever runs ends: then whoever waits runs, and in the end nothing is held."""
        self.gate.check_integrity()
        while self.gate.inside:
            running = [ticket for ticket in self.gate.inside if ticket.reservation]
            assert running, "somebody waits though nobody runs"
            self.gate.leave(running[0], self.now)
            self.gate.check_integrity()
        assert not self.gate.queue and not any(budget.reserved for budget in self.gate.budgets)


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
