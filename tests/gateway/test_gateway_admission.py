"""The ledger of KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.admission import Ledger, NeverFits, NoPool, QueueFull, Reservation


def ledger(total: int = 10, max_running: int = 8, max_queued: int = 8) -> Ledger:
    result = Ledger(max_running=max_running, max_queued=max_queued)
    result.update("a", total=total, block_size=16)
    return result


class Holder:
    """A request that holds its reservation until told to let go."""

    def __init__(self, ledger: Ledger, tokens: int, timeout: float = 60.0) -> None:
        self.granted: Reservation | None = None
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._run(ledger, tokens, timeout))

    async def _run(self, ledger: Ledger, tokens: int, timeout: float) -> None:
        async with ledger.reserve(tokens, timeout) as self.granted:
            await self.let_go.wait()
        self.granted = None


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_blocks_are_rounded_up_and_given_back() -> None:
    book = ledger()
    async with book.reserve(17, 1) as reservation:
        assert (reservation.pool.name, reservation.blocks, book.reserved_blocks, book.running) == ("a", 2, 2, 1)
    assert (book.reserved_blocks, book.running) == (0, 0)
    with pytest.raises(KeyError):
        async with book.reserve(160, 1):
            raise KeyError
    assert (book.reserved_blocks, book.running) == (0, 0)


@pytest.mark.asyncio
async def test_first_come_first_served_and_no_overtaking() -> None:
    book = ledger()
    first, second, third = Holder(book, 96), Holder(book, 96), Holder(book, 16)
    await settle()
    assert first.granted and not second.granted and not third.granted  # the third would fit
    assert book.queued == 2
    first.let_go.set()
    await settle()
    assert second.granted and third.granted and book.queued == 0
    for holder in (second, third):
        holder.let_go.set()
    await asyncio.gather(first.task, second.task, third.task)
    book.check_integrity()
    assert book.reserved_blocks == 0


@pytest.mark.asyncio
async def test_most_running_requests() -> None:
    book = ledger(max_running=1)
    first, second = Holder(book, 16), Holder(book, 16)
    await settle()
    assert first.granted and not second.granted
    first.let_go.set()
    second.let_go.set()
    await asyncio.gather(first.task, second.task)


@pytest.mark.asyncio
async def test_refusals() -> None:
    book = ledger(max_queued=1)
    with pytest.raises(NeverFits) as never:
        async with book.reserve(161, 1):
            pass
    assert (never.value.requested, never.value.limit) == (11, 10)
    async with book.reserve(160, 1):
        waiting = Holder(book, 16)
        await settle()
        with pytest.raises(QueueFull):
            async with book.reserve(16, 1):
                pass
        with pytest.raises(TimeoutError):
            waiting.task.cancel()
            await settle()
            async with book.reserve(16, 0.01):
                pass
        assert book.queued == 0
    with pytest.raises(NoPool):
        async with Ledger(max_running=1, max_queued=1).reserve(1, 1):
            pass


@pytest.mark.asyncio
async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    book = ledger()
    running, large, small = Holder(book, 80), Holder(book, 160), Holder(book, 16)
    await settle()
    assert running.granted and not small.granted
    large.task.cancel()
    await settle()
    assert small.granted
    for holder in (running, small):
        holder.let_go.set()
    await asyncio.gather(running.task, small.task)
    book.check_integrity()


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
    book.close("b")
    book.close("a")
    late = Holder(book, 16)
    with pytest.raises(NoPool):
        await late.task
    for holder in (running, waiting):
        holder.let_go.set()
    await asyncio.gather(running.task, waiting.task)
    book.check_integrity()
    assert book.reserved_blocks == 0


@pytest.mark.asyncio
async def test_the_emptiest_pool_is_chosen() -> None:
    book = ledger()
    book.update("b", total=10, block_size=16)
    async with AsyncExitStack() as exits:
        names = [(await exits.enter_async_context(book.reserve(32, 1))).pool.name for _ in range(4)]
    assert sorted(names) == ["a", "a", "b", "b"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 200)),
        st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["close", "turn"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
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
        outcomes = await asyncio.wait_for(asyncio.gather(*(h.task for h in holders), return_exceptions=True), 5)
        allowed = (NeverFits, QueueFull, NoPool, asyncio.CancelledError, type(None))
        assert all(isinstance(outcome, allowed) for outcome in outcomes), outcomes
        book.check_integrity()
        assert (book.running, book.queued, book.reserved_blocks) == (0, 0, 0)

    run(scenario())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)
