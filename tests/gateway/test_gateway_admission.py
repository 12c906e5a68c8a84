"""The ledger: the gate with tasks that wait."""

from __future__ import annotations

import asyncio

import pytest
from gateway_fakes import until
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.gateway.admission import Ask, Busy, Ledger, NeverFits, NoPool, Reservation
from services.gateway.cost import Class, Cost
from services.gateway.gate import GateLimits
from services.gateway.metrics import LedgerCollector
from services.gateway.tenants import EVERYBODY
from tests.patience import PATIENCE


def ledger(total: int = 10, max_running: int = 8, max_queued: int = 8) -> Ledger:
    result = Ledger(GateLimits(max_running, max_queued))
    result.update("a", total=total, block_size=16)
    return result


def ask(tokens: int) -> Ask:
    return Ask(Cost(tokens, 0))


class Holder:
    """A request that holds its reservation until told to let go."""

    def __init__(self, ledger: Ledger, tokens: int, timeout: float = 60.0) -> None:
        self.granted: Reservation | None = None
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._run(ledger, tokens, timeout))

    async def _run(self, ledger: Ledger, tokens: int, timeout: float) -> None:
        async with ledger.reserve(ask(tokens), timeout) as self.granted:
            await self.let_go.wait()
        self.granted = None


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_blocks_are_rounded_up_and_given_back() -> None:
    book = ledger()
    async with book.reserve(ask(17), 1) as reservation:
        assert (reservation.pool.name, reservation.blocks, book.reserved_blocks, book.running) == ("a", 2, 2, 1)
    assert (book.reserved_blocks, book.running) == (0, 0)
    with pytest.raises(KeyError):
        async with book.reserve(ask(160), 1):
            raise KeyError
    assert (book.reserved_blocks, book.running) == (0, 0)


@pytest.mark.asyncio
async def test_who_waits_gets_in_when_others_end() -> None:
    book = ledger(max_running=1)
    first, second, third = Holder(book, 16), Holder(book, 160), Holder(book, 16)
    await settle()
    assert first.granted and (book.running, book.queued) == (1, 2) and book.queued_by_class == {Class.SHORT_TEXT: 2}
    assert book.expected_wait(ask(16)) > 0
    first.let_go.set()
    await until(lambda: second.granted is not None)
    second.let_go.set()
    await until(lambda: third.granted is not None)
    third.let_go.set()
    await asyncio.gather(first.task, second.task, third.task)
    book.check_integrity()
    assert (book.reserved_blocks, book.queued, book.expected_wait(ask(16))) == (0, 0, 0)


@pytest.mark.asyncio
async def test_refusals() -> None:
    book = ledger(max_queued=1)
    with pytest.raises(NeverFits):
        async with book.reserve(ask(161), 1):
            pass
    async with book.reserve(ask(160), 1):
        waiting = Holder(book, 16)
        await settle()
        with pytest.raises(Busy):
            async with book.reserve(ask(16), 1):
                pass
        with pytest.raises(Busy), book.arriving(EVERYBODY, Class.SHORT_TEXT, 60):
            pass
        assert book.refused == 2
        waiting.task.cancel()
        await settle()
        with pytest.raises(TimeoutError):
            async with book.reserve(ask(16), 0.01):
                pass
        assert book.queued == 0
    with pytest.raises(NoPool):
        async with Ledger(GateLimits(1, 1)).reserve(ask(1), 1):
            pass


@pytest.mark.asyncio
async def test_a_waiter_cancelled_as_it_is_let_in_gives_back() -> None:
    book = ledger()
    first, second = Holder(book, 160), Holder(book, 160)
    await settle()
    first.let_go.set()
    await asyncio.sleep(0)
    second.task.cancel()  # in the same turn of the loop as, or right after, the grant
    await asyncio.gather(first.task, second.task, return_exceptions=True)
    book.check_integrity()
    assert (book.running, book.queued, book.reserved_blocks) == (0, 0, 0)


@pytest.mark.asyncio
async def test_pools_that_close_and_shrink() -> None:
    book = ledger()
    running, waiting = Holder(book, 160), Holder(book, 160)
    await settle()
    book.update("b", total=5, block_size=16)
    await settle()
    assert not waiting.granted and book.queued == 1  # b is too small, a may do later
    book.update("a", total=4, block_size=16)
    with pytest.raises(NeverFits):
        await waiting.task
    waiting = Holder(book, 80)
    await settle()
    assert waiting.granted and waiting.granted.pool.name == "b"
    blocked = Holder(book, 80)
    await settle()
    book.close("b")
    book.close("a")
    with pytest.raises(NoPool):
        await blocked.task
    for holder in (running, waiting):
        holder.let_go.set()
    await asyncio.gather(running.task, waiting.task)
    book.check_integrity()
    assert book.reserved_blocks == 0


@pytest.mark.asyncio
async def test_figures_of_the_ledger() -> None:
    book = ledger()
    book.update("b", total=6, block_size=16, batch_tokens=100, max_sequences=4)
    book.update_encoders(batch_patches=50, max_items=9, max_bytes=1000)
    collector = LedgerCollector(book)
    REGISTRY.register(collector)
    try:
        async with book.reserve(Ask(Cost(40, 5, encoder_patches=30, encoder_items=1, media_bytes=70), Class.IMAGE), 1) as held:
            assert book.reserved == {
                "requests": 1, "encoder_patches": 30, "encoder_items": 1, "encoder_bytes": 70, "host_bytes": 70,
                "kv_blocks": 3, "prefill_tokens": 40, "sequences": 1,
            }  # fmt: skip
            assert (book.limit["kv_blocks"], book.limit["prefill_tokens"], book.limit["encoder_patches"]) == (16, 400, 200)
            assert (book.limit["sequences"], book.limit["requests"]) == (5, 8)
            assert REGISTRY.get_sample_value("triptych_gateway_reserved", {"budget": "kv_blocks"}) == 3
            assert REGISTRY.get_sample_value("triptych_gateway_budget", {"budget": "kv_blocks"}) == 16
            assert REGISTRY.get_sample_value("triptych_gateway_queued_requests", {"kind": "image"}) == 0
            book.flowed(held)
            assert (book.reserved["encoder_patches"], book.reserved["prefill_tokens"], book.reserved["kv_blocks"]) == (0, 0, 3)
            book.move(held, "a" if held.pool.name == "b" else "b")
            book.close("a")
            assert book.limit["kv_blocks"] == 6
        assert set(book.reserved.values()) == {0}
    finally:
        REGISTRY.unregister(collector)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 200)),
        st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["close", "turn"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_nothing_is_lost_whatever_happens(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        book = ledger(max_running=4, max_queued=4)
        holders: list[Holder] = []
        for verb, number in steps:
            if verb == "ask":
                holders.append(Holder(book, number))
            elif verb == "end" and holders:
                holders[number % len(holders)].let_go.set()
            elif verb == "cancel" and holders:
                holders[number % len(holders)].task.cancel()
            elif verb == "resize":
                book.update("a", total=number, block_size=16)
            elif verb == "close":
                book.close("a")
            else:
                await asyncio.sleep(0)
            book.check_integrity()
        book.update("a", total=20, block_size=16)
        for holder in holders:
            holder.let_go.set()
        outcomes = await asyncio.wait_for(asyncio.gather(*(h.task for h in holders), return_exceptions=True), PATIENCE)
        allowed = (NeverFits, Busy, NoPool, asyncio.CancelledError, type(None))
        assert all(isinstance(outcome, allowed) for outcome in outcomes), outcomes
        book.check_integrity()
        assert (book.running, book.queued, book.reserved_blocks) == (0, 0, 0)

    asyncio.run(scenario())
