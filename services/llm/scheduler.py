"""Chooses what the next step computes. No torch, no grpc, no clock: a pure function of the sequences and the blocks.

Every step packs decodes first, then prefill chunks of rows that have arrived, under one token budget. A sequence whose
rows are missing takes nothing and holds nobody up. When the pool runs out, the youngest sequence gives its blocks back
and starts over later from its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.llm.block_manager import BlockManager
from services.llm.sequence import Sequence, Status


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + count)`` of one sequence, to compute in a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step yields the sequence's next token."""
        return self.start + self.count == self.sequence.length


class Scheduler:
    """Holds every unfinished sequence, in order of arrival."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.token_budget = max_num_batched_tokens
        self.max_sequences = max_num_seqs
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._stale: list[int] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, which must fit into the pool when it runs alone."""
        assert self.blocks.blocks_for(len(sequence.prompt) + sequence.max_tokens) <= self.blocks.total
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with blocks allocated for them; empty when nothing can be computed."""
        chunks: list[Chunk] = []
        budget = self.token_budget
        preemptions = self.preemptions
        for sequence in [s for s in self.running if s.decoding]:
            if sequence.status is Status.RUNNING and self._make_room(sequence, sequence.length):
                chunks.append(Chunk(sequence, sequence.computed, 1))
                budget -= 1
        for sequence in [s for s in self.running if not s.decoding]:
            if sequence.status is Status.RUNNING:
                budget -= self._prefill(sequence, budget, chunks)
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_sequences or self.preemptions > preemptions:
                break  # after a preemption nobody is let in, or the two would take turns
            count = min(sequence.ready - sequence.computed, budget)
            if count <= 0:
                continue
            if not self.blocks.can_grow(sequence.block_table, count):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            budget -= self._prefill(sequence, budget, chunks)
        # a sequence scheduled above may have been preempted by a later one
        return [c for c in chunks if c.sequence.status is Status.RUNNING]

    def take_stale(self) -> list[int]:
        """Blocks given back since the last call by sequences that did not end by themselves.

        They may hold values that are not numbers, which a mask does not hide (0 * NaN is NaN): clear them before the next step.
        """
        stale, self._stale = self._stale, []
        return stale

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free its blocks."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        if sequence.finish is None:
            self._stale += sequence.block_table
        self.blocks.release(sequence.block_table)

    def check_integrity(self) -> None:
        """Assert that blocks add up and only running sequences hold any."""
        self.blocks.check_integrity([s.block_table for s in self.running])
        assert all(not s.block_table for s in self.waiting)

    def _prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Add a chunk of ready tokens; returns how many."""
        count = min(sequence.ready - sequence.computed, budget)
        if count <= 0 or not self._make_room(sequence, sequence.computed + count):
            return 0
        chunks.append(Chunk(sequence, sequence.computed, count))
        return count

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grow the block table, preempting younger sequences where needed; False if ``sequence`` itself had to give way."""
        while not self.blocks.can_grow(sequence.block_table, tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self.blocks.grow(sequence.block_table, tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._stale += sequence.block_table
        self.blocks.release(sequence.block_table)
        sequence.status, sequence.computed = Status.WAITING, 0
        self.waiting.insert(0, sequence)
        self.preemptions += 1
