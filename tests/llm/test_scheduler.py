"""What a step computes: budgets, order, waiting rows, atoms, bounded overtaking, preemption, forks."""

from __future__ import annotations

from typing import Any

import pytest

from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Finish, RowSpan, Sequence, Status

FULL = Kind.FULL


def sequence(name: str, prompt: int, max_tokens: int = 4, **options: Any) -> Sequence:
    """Its prompt begins like no other's."""
    return Sequence(name, [hash(name) % 10**6, *range(1, prompt)], max_tokens, frozenset({999}), **options)


def scheduler(blocks: int = 64, block_size: int = 4, budget: int = 16, seqs: int = 8, **options: Any) -> Scheduler:
    return Scheduler(KvCache([LayerGroup(FULL, blocks)], block_size), budget, seqs, **options)


def run_step(s: Scheduler, token: int = 7, prompt_tokens: int | None = None) -> list[Chunk]:
    """What the engine does with a schedule, on a model that always says ``token``."""
    chunks = s.schedule(prompt_tokens)
    sampling = [c.sequence for c in chunks if c.samples]
    s.commit(chunks)
    for q in sampling:
        answers = [q, *(s.fork(q, [f"{q.id}.{i}" for i in range(1, q.n)]) if q.n > 1 else [])]
        for answer in answers:
            answer.append(token)
            if answer.finish:
                s.finish(answer)
    s.check_integrity()
    return chunks


def names(chunks: list[Chunk]) -> list[tuple[str, int]]:
    return [(c.sequence.id, c.count) for c in chunks]


def finish_all(s: Scheduler) -> None:
    for _ in range(1000):
        if not (s.running or s.waiting):
            return
        assert run_step(s)
    raise AssertionError("a sequence does not end")


def test_beside_decodes_prompts_take_as_much_as_they_are_given() -> None:
    s = scheduler()
    s.add(sequence("first", 14, max_tokens=1))
    assert names(run_step(s, prompt_tokens=5)) == [("first", 14)], "nobody waits for this step"
    s.add(sequence("a", 3, max_tokens=9))
    run_step(s)
    s.add(sequence("b", 14))
    s.add(sequence("c", 3))
    steps = [names(run_step(s, prompt_tokens=5)) for _ in range(3)]
    assert steps == [[("a", 1), ("b", 5)], [("a", 1), ("b", 5)], [("a", 1), ("b", 4), ("c", 1)]]
    finish_all(s)


def test_beside_decodes_an_atom_is_not_split() -> None:
    s = scheduler()
    s.add(sequence("a", 3, max_tokens=9))
    run_step(s)
    s.add(sequence("b", 14, atoms=[(2, 12)]))
    steps = [names(run_step(s, prompt_tokens=5)) for _ in range(3)]
    assert steps == [[("a", 1), ("b", 2)], [("a", 1), ("b", 12)], [("a", 1), ("b", 1)]]
    finish_all(s)


def test_decodes_come_first_and_prefill_fills_the_budget() -> None:
    s = scheduler()
    s.add(sequence("a", 3))
    run_step(s)
    s.add(sequence("b", 40))
    assert names(run_step(s)) == [("a", 1), ("b", 15)]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    s = scheduler(budget=10)
    s.add(sequence("a", 25))
    assert [run_step(s)[0].count for _ in range(3)] == [10, 10, 5]


def test_running_prompts_go_before_new_ones() -> None:
    s = scheduler(budget=10)
    s.add(sequence("long", 15))
    run_step(s)
    s.add(sequence("urgent", 4, priority=-1))
    assert names(run_step(s)) == [("long", 5), ("urgent", 4)]


def test_waiting_sequences_are_let_in_by_priority_then_arrival() -> None:
    s = scheduler(budget=100)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)]:
        s.add(sequence(name, 2, priority=priority))
    assert [name for name, _ in names(run_step(s))] == ["e", "b", "d", "a", "c"]


def test_no_more_sequences_run_than_there_are_slots_and_slots_come_back() -> None:
    s = scheduler(seqs=2)
    everyone = [sequence(n, 2, max_tokens=2) for n in "abc"]
    for q in everyone:
        s.add(q)
    assert len(run_step(s)) == 2 and [q.slot for q in everyone] == [0, 1, -1]
    run_step(s)
    assert names(run_step(s)) == [("c", 2)] and [q.slot for q in everyone] == [-1, -1, 0]


def test_a_sequence_without_rows_takes_nothing_and_holds_nobody_up() -> None:
    s = scheduler()
    picture = sequence("picture", 10, spans=[RowSpan(0, 6)])
    s.add(picture)
    s.add(sequence("text", 5, max_tokens=1))
    assert names(run_step(s)) == [("text", 5)]
    assert run_step(s) == [] and picture.tables == [] and picture.passed_over == 0
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


def test_with_cross_rows_nothing_is_computed_before_all_have_arrived() -> None:
    s = Scheduler(KvCache([LayerGroup(FULL, 8), LayerGroup(Kind.CROSS, 8)], 4), 16, 4)
    q = sequence("q", 8, spans=[RowSpan(5, 9, tokens=1)], cross_rows=9)
    s.add(q)
    q.spans[0].arrived = 8
    assert run_step(s) == []
    q.spans[0].arrived = 9
    assert names(run_step(s)) == [("q", 8)] and [len(t.blocks) for t in q.tables] == [2, 3]


def test_rows_are_not_waited_for_where_the_prefix_cache_has_the_item() -> None:
    s = scheduler()
    first = Sequence("first", list(range(12)), 1, frozenset(), spans=[RowSpan(0, 7, 7, b"d")])
    s.add(first)
    run_step(s)
    again = Sequence("again", list(range(12)), 1, frozenset(), spans=[RowSpan(0, 7, 0, b"d")])
    s.add(again)
    (chunk,) = run_step(s)
    assert (chunk.start, chunk.count, again.cached) == (8, 4, 8)


def test_a_chunk_never_ends_inside_an_atom() -> None:
    s = scheduler(budget=7, seqs=4)
    s.add(sequence("a", 20, atoms=[(2, 6), (6, 13)]))
    assert [run_step(s)[0].count for _ in range(3)] == [6, 7, 7]


def test_an_atom_waits_for_all_of_its_rows() -> None:
    s = scheduler()
    q = sequence("q", 10, spans=[RowSpan(3, 4, arrived=3)], atoms=[(3, 7)])
    s.add(q)
    assert names(run_step(s)) == [("q", 3)]
    assert run_step(s) == []
    q.spans[0].arrived = 4
    assert names(run_step(s)) == [("q", 7)]


def test_an_atom_that_only_an_empty_step_holds_is_overtaken_a_bounded_number_of_times() -> None:
    s = scheduler(budget=8, seqs=4, max_passed_over=3)
    s.add(sequence("first", 2, max_tokens=6))
    run_step(s)
    whole = sequence("whole", 8, atoms=[(0, 8)])
    s.add(whole)
    for i in range(40):
        s.add(sequence(f"short {i}", 2, max_tokens=6))
    ran = []
    while not whole.output:
        ran += [c.sequence.id for c in run_step(s) if c.start == 0]
    assert len(ran) == 1 + 3 and ran[-1] == "whole"


def test_a_running_prompt_whose_atom_does_not_fit_is_overtaken_a_bounded_number_of_times() -> None:
    s = scheduler(budget=8, seqs=4, max_passed_over=2)
    s.add(sequence("first", 2, max_tokens=4))
    q = sequence("q", 10, atoms=[(2, 10)])
    s.add(q)
    for i in range(40):
        s.add(sequence(f"short {i}", 2, max_tokens=6))
    begun = {c.sequence.id for _ in range(40) if not q.output for c in run_step(s)}
    assert q.output and len(begun - {"first", "q"}) == 2 + 2  # two were let in beside its first two tokens


def test_a_sequence_that_does_not_fit_is_passed_over_a_bounded_number_of_times() -> None:
    s = scheduler(blocks=16, budget=64, max_passed_over=4, watermark=0.0)
    s.add(sequence("first", 20, max_tokens=30))
    run_step(s)
    big = sequence("big", 50, max_tokens=2)
    s.add(big)
    for i in range(30):
        s.add(sequence(f"short {i}", 4, max_tokens=2))
    begun: list[str] = []
    while not big.output:
        begun += [c.sequence.id for c in run_step(s) if c.start == 0]
        assert big.passed_over <= 4
    assert begun.index("big") == 4 and s.preemptions == 0
    finish_all(s)


def test_a_new_sequence_leaves_what_running_prompts_still_need_and_the_watermark() -> None:
    s = scheduler(blocks=20, budget=16, watermark=0.1)
    s.add(sequence("long", 40, max_tokens=2))  # 10 blocks, of which 4 are held after the first step
    run_step(s)
    s.add(sequence("needs nine", 36, max_tokens=1))
    s.add(sequence("needs eight", 32, max_tokens=1))
    assert names(run_step(s)) == [("long", 16)]
    assert names(run_step(s)) == [("long", 8), ("needs eight", 8)]
    alone = scheduler(blocks=20, budget=100, watermark=0.5)
    alone.add(sequence("all", 79, max_tokens=1))
    assert names(run_step(alone)) == [("all", 79)], "the watermark is ignored when nothing runs"


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
    assert s.kv.pools[0].available == 6


def test_the_lowest_priority_gives_way_before_the_youngest() -> None:
    s = scheduler(blocks=7, budget=64, watermark=0.0)
    cheap, dear = sequence("cheap", 8, max_tokens=12, priority=5), sequence("dear", 8, max_tokens=12)
    s.add(cheap)
    run_step(s)
    s.add(dear)
    while not dear.finish:
        run_step(s)
    assert s.preemptions == 1 and cheap.preempted and not dear.preempted


def test_after_a_preemption_nobody_is_let_in_within_that_step_and_the_preempted_goes_first() -> None:
    s = scheduler(blocks=6, budget=64, watermark=0.0)
    s.add(sequence("old", 8, max_tokens=16))
    s.add(sequence("young", 8, max_tokens=16))
    run_step(s)
    s.add(sequence("small", 1, max_tokens=1))
    s.waiting[0].spans.append(RowSpan(0, 1))
    while not s.preemptions:
        s.waiting[0].spans[0].arrived = int(s.kv.pools[0].available == 0)
        chunks = run_step(s)
    assert names(chunks) == [("old", 1)] and [q.id for q in s.waiting] == ["young", "small"]


def test_a_step_in_which_everybody_gave_way_is_scheduled_again() -> None:
    """An empty schedule means that nothing can run, so the engine would sleep."""
    s = scheduler(blocks=4, budget=64, watermark=0.0)
    stuck = sequence("stuck", 12, max_tokens=1, spans=[RowSpan(8, 4)])
    s.add(stuck)
    run_step(s)
    young = sequence("young", 4, max_tokens=8)
    s.add(young)
    while young.computed < 8:
        run_step(s)
    s.add(sequence("small", 3, max_tokens=1))
    assert names(run_step(s)) == [("small", 3)] and s.preemptions == 1
    stuck.spans[0].arrived = 4
    finish_all(s)


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    s = scheduler(blocks=7, budget=64, watermark=0.0)
    s.add(sequence("old", 8, max_tokens=9))
    young = sequence("young", 12, max_tokens=12)
    s.add(young)
    while not s.preemptions:
        run_step(s)
    while young.status is not Status.RUNNING:
        run_step(s)
    assert young.started > 0 and young.cached == 0 and s.kv.queries == 20
    finish_all(s)


def test_a_sequence_whose_reader_lags_is_not_let_in_again() -> None:
    s = scheduler()
    lagging, other = sequence("lagging", 6), sequence("other", 6)
    s.add(lagging)
    run_step(s)
    lagging.paused = True
    s.preempt(lagging)
    s.add(other)
    assert names(run_step(s)) == [("other", 6)] and lagging.status is Status.WAITING
    rest = [run_step(s) for _ in range(3)]
    assert all(names(chunks) == [("other", 1)] for chunks in rest) and not s.schedule()
    lagging.paused = False
    finish_all(s)


def test_a_refusal_says_what_is_needed_and_what_there_is() -> None:
    s = Scheduler(KvCache([LayerGroup(FULL, 64), LayerGroup(Kind.SLIDING, 3, 4)], 4), 16, 2)
    assert s.refusal(sequence("fine", 3, max_tokens=4)) is None
    assert "3 answers" in str(s.refusal(sequence("many", 3, n=3)))
    assert "17 tokens" in str(s.refusal(sequence("atom", 20, atoms=[(1, 18)])))
    assert "need 65 blocks of 4 in the full KV pool, which has 64" in str(s.refusal(sequence("long", 250, max_tokens=8)))
    assert "sliding" in str(s.refusal(sequence("wide", 16, max_tokens=4)))
    with pytest.raises(AssertionError, match="65 blocks"):
        s.add(sequence("long", 250, max_tokens=8))


def test_the_last_token_of_an_answer_takes_no_block() -> None:
    s = scheduler(blocks=2)
    q = sequence("q", 5, max_tokens=4)
    s.add(q)
    finish_all(s)
    assert len(q.output) == 4 and s.refusal(sequence("q", 5, max_tokens=5))


def test_a_fork_shares_the_prompt_and_each_answer_gets_a_slot() -> None:
    s = scheduler(seqs=4)
    q = sequence("q", 10, n=3)
    s.add(q)
    s.add(sequence("one", 2))
    s.add(sequence("two", 2))
    chunks = s.schedule()
    assert names(chunks) == [("q", 10), ("one", 2)], "a sequence counts as its answers before it forks"
    s.commit(chunks)
    children = s.fork(q, ["q1", "q2"])
    assert [c.tables[0].blocks for c in children] == [q.tables[0].blocks] * 2
    assert {x.slot for x in s.running} == {0, 1, 2, 3} and q.n == 1 and s.kv.pools[0].free == 64 - 4
    for token, answer in enumerate([q, *children]):
        answer.append(token)
    s.running[1].append(5)
    s.check_integrity()
    run_step(s)
    copies = s.kv.take_copies()
    last = {x.tables[0].blocks[2] for x in (q, *children)}
    assert len(copies) == 2 and len({c[1] for c in copies}) == 1 and len(last) == 3, "the last holder writes in place"
    assert len({x.tables[0].blocks[1] for x in (q, *children)}) == 1
    finish_all(s)
    assert [len(x.output) for x in (q, *children)] == [4, 4, 4]


def test_an_answer_that_is_aborted_leaves_the_others_their_blocks() -> None:
    s = scheduler()
    q = sequence("q", 10, n=2)
    s.add(q)
    run_step(s)
    child = s.running[1]
    s.finish(q)
    s.check_integrity()
    finish_all(s)
    assert child.output == [7] * 4 and s.kv.pools[0].available == 64


def test_a_sliding_sequence_is_longer_than_its_pool() -> None:
    s = Scheduler(KvCache([LayerGroup(Kind.SLIDING, 5, 8)], 4), 8, 2)
    q = sequence("q", 60, max_tokens=30)
    s.add(q)
    finish_all(s)
    assert len(q.output) == 30 and s.preemptions == 0


def test_the_pruned_stretch_is_one_chunk_and_its_group_holds_only_kept_rows() -> None:
    s = Scheduler(KvCache([LayerGroup(FULL, 16), LayerGroup(Kind.PRUNED, 16)], 4), 16, 2)
    q = sequence("q", 20, max_tokens=6, dropped=9, drop_from=5, atoms=[(4, 7)])
    assert q.atoms == [(4, 20)]
    s.add(q)
    assert [run_step(s)[0].count for _ in range(2)] == [4, 16]
    assert [len(t.blocks) for t in q.tables] == [5, 3] and q.kept(5) == 5 and q.kept(21) == 12
    finish_all(s)
    assert len(q.output) == 6


def test_end_tokens_stop_and_min_tokens_holds_them_off() -> None:
    q = Sequence("a", [1], 5, frozenset({999}), min_tokens=2)
    q.append(999)
    q.append(999)
    assert q.finish is None
    q.append(999)
    assert q.finish is Finish.STOP


def test_every_running_sequence_must_be_able_to_decode() -> None:
    with pytest.raises(AssertionError, match="decode in one step"):
        scheduler(budget=4, seqs=5)
