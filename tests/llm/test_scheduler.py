"""Scheduler and block manager as pure functions: budgets, order, waiting rows, preemption, integrity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.llm.block_manager import BlockManager, OutOfBlocks
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Finish, RowSpan, Sequence, Status


def sequence(name: str, prompt: int, max_tokens: int = 4, spans: list[RowSpan] | None = None) -> Sequence:
    return Sequence(name, list(range(prompt)), max_tokens, frozenset({999}), spans=spans or [])


def scheduler(blocks: int = 64, block_size: int = 4, budget: int = 16, seqs: int = 8) -> Scheduler:
    return Scheduler(BlockManager(blocks, block_size), budget, seqs)


def run_step(s: Scheduler, token: int = 7) -> list[Chunk]:
    """What the engine does with a schedule, on a model that always says ``token``."""
    chunks = s.schedule()
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.computed += chunk.count
        if samples:
            chunk.sequence.append(token)
            if chunk.sequence.finish:
                s.finish(chunk.sequence)
    s.check_integrity()
    return chunks


def test_decodes_come_first_and_prefill_fills_the_budget() -> None:
    s = scheduler()
    s.add(sequence("a", 3))
    run_step(s)
    s.add(sequence("b", 40))
    chunks = run_step(s)
    assert [(c.sequence.id, c.count) for c in chunks] == [("a", 1), ("b", 15)]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    s = scheduler(budget=10)
    s.add(sequence("a", 25))
    assert [run_step(s)[0].count for _ in range(3)] == [10, 10, 5]


def test_a_sequence_without_rows_takes_nothing_and_holds_nobody_up() -> None:
    s = scheduler()
    picture = sequence("picture", 10, spans=[RowSpan(0, 6)])
    s.add(picture)
    s.add(sequence("text", 5, max_tokens=1))
    assert [c.sequence.id for c in run_step(s)] == ["text"]
    assert run_step(s) == [] and picture.block_table == []
    picture.spans[0].arrived = 4
    assert [(c.start, c.count) for c in run_step(s)] == [(0, 4)]
    picture.spans[0].arrived = 6
    (chunk,) = run_step(s)
    assert (chunk.start, chunk.count) == (4, 6) and len(picture.output) == 1


def test_rows_after_a_gap_do_not_count_as_ready() -> None:
    two = sequence("two", 12, spans=[RowSpan(2, 3), RowSpan(7, 3, arrived=3)])
    assert two.ready == 2
    two.spans[0].arrived = 3
    assert two.ready == 12


def test_the_youngest_gives_way_and_still_says_the_same() -> None:
    s = scheduler(blocks=6, block_size=4, budget=64)
    old, young = sequence("old", 8, max_tokens=12), sequence("young", 8, max_tokens=12)
    s.add(old)
    s.add(young)
    finished_at: dict[str, int] = {}
    for step in range(200):
        run_step(s)
        for q in (old, young):
            if q.finish and q.id not in finished_at:
                finished_at[q.id] = step
    assert s.preemptions > 0
    assert finished_at["old"] < finished_at["young"]
    assert old.output == young.output == [7] * 12
    assert s.blocks.free == 6


def test_a_sequence_that_can_never_fit_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        scheduler(blocks=2, block_size=4).add(sequence("a", 8, max_tokens=4))


def test_end_tokens_stop_and_min_tokens_holds_them_off() -> None:
    q = Sequence("a", [1], 5, frozenset({999}), min_tokens=2)
    q.append(999)
    q.append(999)
    assert q.finish is None
    q.append(999)
    assert q.finish is Finish.STOP


def test_growing_beyond_the_pool_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    table: list[int] = []
    blocks.grow(table, 5)
    with pytest.raises(OutOfBlocks):
        blocks.grow(table, 17)
    assert len(table) == 2 and blocks.free == 1
    blocks.check_integrity([table])


def test_integrity_check_sees_a_lost_block() -> None:
    blocks = BlockManager(3, 4)
    table: list[int] = []
    blocks.grow(table, 5)
    with pytest.raises(AssertionError):
        blocks.check_integrity([table[:1]])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(10, 30), st.integers(1, 5), st.integers(4, 40), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_every_sequence_ends_and_blocks_add_up(
    plans: list[tuple[int, int, int, int]], total: int, block_size: int, budget: int, seqs: int, data: st.DataObject
) -> None:
    """Random arrivals, rows and aborts: budgets hold at every step, everybody ends, nothing is left."""
    s = scheduler(total, block_size, max(budget, seqs), seqs)
    coming = []
    for i, (prompt, answer, rows, arrives) in enumerate(plans):
        rows = min(rows, prompt)
        q = sequence(str(i), prompt, answer, [RowSpan(0, rows)] if rows else [])
        if s.blocks.blocks_for(prompt + answer) <= total:
            coming.append((arrives, q))
    everyone = [q for _, q in coming]
    for step in range(3000):
        for arrives, q in coming:
            if arrives == step:
                s.add(q)
            if arrives <= step and q.spans and q.spans[0].arrived < q.spans[0].rows and (step > 40 or data.draw(st.booleans())):
                q.spans[0].arrived += 1
        if step < 20 and s.running and data.draw(st.integers(0, 9)) == 0:
            s.finish(s.running[0])
        chunks = run_step(s)
        assert sum(c.count for c in chunks) <= s.token_budget
        assert len({id(c.sequence) for c in chunks}) == len(chunks) <= seqs
        if step > 20 and all(q.status is Status.FINISHED for q in everyone):
            break
    assert all(q.status is Status.FINISHED for q in everyone)
    assert s.blocks.free == total
