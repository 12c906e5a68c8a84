"""Chooses what the next step computes. No torch, no grpc, no clock: a pure function of the sequences and the blocks.

Every step packs decodes first, then prefill chunks of rows that have arrived, then new sequences, under one token budget. A
sequence whose rows are missing takes nothing and holds nobody up; one that could run but does not fit is passed over, a
bounded number of times. When a pool runs out, the youngest sequence of the lowest priority gives its blocks back and starts
over later from its own tokens.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, replace

from services.llm.kv_cache import KvCache
from services.llm.sequence import Sequence, Status


@dataclass(slots=True)
class Chunk:
    """Tokens ``[start, start + count)`` of one sequence, to compute in a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step yields the sequence's next token; asked before that token is appended."""
        return self.start + self.count == self.sequence.length


class Scheduler:
    """Holds every unfinished sequence.

    Invariant: ``passed_over <= max_passed_over`` for every sequence, and the ``n`` of those running add up to at most
    ``max_num_seqs``, so that a fork never lacks a slot.

    Attributes:
        waiting: in the order in which they are let in: by priority, the preempted first, then by arrival.
        running: in the order in which they were let in.
        preemptions: how often a sequence gave its blocks back.
    """

    def __init__(
        self,
        kv: KvCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_passed_over: int = 16,
        watermark: float = 0.01,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        """``watermark`` is the share of each pool that stays free when a sequence is let in beside others.

        ``long_prefill_token_threshold`` is the most tokens that a step takes of one prompt, atoms aside; 0 sets no bound.
        """
        assert 0 < max_num_seqs <= max_num_batched_tokens, "every running sequence must be able to decode in one step"
        assert max_passed_over > 0
        self.kv = kv
        self.token_budget, self.max_sequences, self.max_passed_over = max_num_batched_tokens, max_num_seqs, max_passed_over
        self._threshold = long_prefill_token_threshold or max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._watermarks = [int(watermark * group.blocks) for group in kv.groups]
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots keep batches dense
        self._arrivals = 0

    def refusal(self, sequence: Sequence) -> str | None:
        """Why a sequence could never run to its end here, in a sentence for the client; None if it can."""
        if sequence.n > self.max_sequences:
            return f"{sequence.n} answers were asked for but at most {self.max_sequences} sequences run at once"
        for start, end in sequence.atoms:
            if end - start > self.token_budget:
                return (
                    f"tokens {start} to {end} must be computed in one step of {end - start} tokens,"
                    f" but a step holds at most {self.token_budget} (--max-num-batched-tokens)"
                )
        if misfit := self.kv.fits_ever(sequence, self.token_budget):
            group, needed, total = misfit
            return (
                f"a prompt of {len(sequence.prompt)} tokens and an answer of up to {sequence.max_tokens} need {needed} blocks of"
                f" {self.kv.block_size} in the {group.kind.value} KV pool, which has {total}"
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, for which there must be no :meth:`refusal`."""
        reason = self.refusal(sequence)
        assert reason is None, reason
        sequence.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, sequence, key=_place)

    def schedule(self, prompt_tokens: int | None = None) -> list[Chunk]:
        """The next step's chunks, with blocks allocated for them; empty when nothing can be computed.

        Args:
            prompt_tokens: most of them beside decodes, though an atom is never split; None: as many as the budget has.

        The copies and clearings that the step needs are in ``kv.take_copies()`` and ``kv.take_stale()``.
        """
        preemptions = self.preemptions
        chunks: list[Chunk] = []
        prefills: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or sequence.paused:
                continue  # preempted by one before it, or its reader lags
            if not sequence.decoding:
                prefills.append(sequence)
            elif sequence.computed < sequence.room or self._make_room(sequence, sequence.computed + 1):
                chunks.append(Chunk(sequence, sequence.computed, 1))
        decodes, most = len(chunks), self.token_budget - len(chunks)
        for budget in [most] if prompt_tokens is None or not decodes else [min(most, prompt_tokens), most]:
            if prefills:
                budget = self._continue_prefills(prefills, budget, chunks)
            if self.preemptions > preemptions:
                # a sequence scheduled above may have given way to a later one; nobody is let in, or the two would take turns
                chunks = [c for c in chunks if c.sequence.status is Status.RUNNING]
                return chunks or self.schedule()
            if self.waiting and budget > 0 and self._free_slots:
                self._let_in(prefills, budget, chunks)
            if len(chunks) > decodes:
                break  # else an atom may be longer than the smaller budget
        return chunks

    def commit(self, chunks: list[Chunk]) -> None:
        """Take note that a step has run. Tokens that it yields are appended afterwards."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue  # it was ended while the step ran
            sequence.computed = computed = chunk.start + chunk.count
            if computed >= sequence.edge or chunk.count > 1:
                self.kv.settle(sequence)

    def fork(self, parent: Sequence, ids: list[str]) -> list[Sequence]:
        """Turn a sequence of ``n`` answers into ``n`` sequences, after its prompt was computed and before its first token.

        Returns:
            The others, one per id; they run at once and share the blocks of the prompt.
        """
        assert parent.status is Status.RUNNING and parent.computed == parent.length and not parent.output
        assert parent.n == 1 + len(ids)
        parent.n = 1
        children = []
        for name in ids:
            slot = heapq.heappop(self._free_slots)
            child = replace(parent, id=name, slot=slot, output=[], tables=[], keys=parent.keys.copy())
            self.kv.fork(parent, child)
            self.running.append(child)
            children.append(child)
        return children

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to wait; it starts over from its own tokens and goes before its equals."""
        self._stop(sequence)
        sequence.status, sequence.preempted = Status.WAITING, True
        insort(self.waiting, sequence, key=_place)
        self.preemptions += 1

    def finish(self, sequence: Sequence, poisoned: bool = False) -> None:
        """Take a sequence out, whatever its state, and give its blocks back.

        Poisoned: its values are not numbers or the step that computed it failed, so nobody may find the blocks it alone holds.
        """
        if sequence.status is Status.RUNNING:
            self._stop(sequence, poisoned)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Assert that blocks and slots add up, that only running sequences hold any, and that the queue is in order."""
        self.kv.check_integrity(self.running)
        assert all(not s.tables and s.slot < 0 and s.status is Status.WAITING for s in self.waiting)
        assert self.waiting == sorted(self.waiting, key=_place)
        slots = [s.slot for s in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_sequences)), "slots were lost or doubled"
        assert sum(s.n for s in self.running) <= self.max_sequences
        assert all(s.n == 1 for s in self.running if s.output), "a sequence of several answers did not fork"
        assert all(s.passed_over <= self.max_passed_over for s in self.running + self.waiting)

    def _continue_prefills(self, prefills: list[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Add chunks of running prompts, the most urgent first; returns the budget left."""
        prefills.sort(key=_urgency)
        for sequence in prefills:
            if sequence.status is not Status.RUNNING or budget <= 0:
                continue
            count = self._cut(sequence, sequence.computed, budget)
            if count > 0 and self._make_room(sequence, sequence.computed + count):
                sequence.passed_over = 0
                chunks.append(Chunk(sequence, sequence.computed, count))
                budget -= count
        return budget

    def _let_in(self, prefills: list[Sequence], budget: int, chunks: list[Chunk]) -> None:
        """Admit waiting sequences in their order while budget, slots and blocks last."""
        scheduled = {id(c.sequence) for c in chunks}
        # those that could run but do not; whoever is let in now passes over them
        held_up = [s for s in prefills if id(s) not in scheduled and self._cut(s, s.computed, self.token_budget) > 0]
        seats = self.max_sequences - sum(s.n for s in self.running)
        spare = self._spare(prefills)
        for sequence in list(self.waiting):
            if budget <= 0 or seats <= 0 or any(s.passed_over >= self.max_passed_over for s in held_up):
                break
            prefix = None if sequence.paused else self._prefix_with_ready_rows(sequence)
            if prefix is None:
                continue
            count = self._cut(sequence, prefix, budget)
            if count <= 0 or sequence.n > seats or not self.kv.fits_now(sequence, prefix, self.token_budget, spare):
                held_up.append(sequence)
                if len(held_up) > self.max_passed_over:
                    break  # bounds the search, not the order
                continue
            for other in held_up:
                other.passed_over += 1
            self._start(sequence, prefix)
            if not self.kv.allocate(sequence, prefix + count):
                raise AssertionError("a sequence that fits lacks blocks")
            chunks.append(Chunk(sequence, prefix, count))
            prefills.append(sequence)
            budget, seats, spare = budget - count, seats - sequence.n, self._spare(prefills)

    def _prefix_with_ready_rows(self, sequence: Sequence) -> int | None:
        """The prefix that a waiting sequence finds in the cache; None if it has no ready rows behind it."""
        if not self.kv.may_start(sequence):
            return None
        prefix = self.kv.longest_prefix(sequence)
        return prefix if self._cut(sequence, prefix, self.token_budget) > 0 else None

    def _spare(self, prefills: list[Sequence]) -> list[int]:
        """Per group, blocks that whoever is let in must leave to those that run."""
        if not self.running:
            return [0] * len(self._watermarks)
        spare = self._watermarks.copy()
        for sequence in prefills:
            for index, blocks in enumerate(self.kv.outstanding(sequence, self.token_budget)):
                spare[index] += blocks
        return spare

    def _cut(self, sequence: Sequence, start: int, budget: int) -> int:
        """Ready tokens from ``start`` on for one chunk, ending outside every atom; not positive if there are none."""
        last = min(sequence.ready_after(start), start + budget)
        stop = min(last, start + self._threshold)
        if (atom := sequence.atom_at(stop)) is None:
            return stop - start
        if atom[0] <= start and atom[1] <= last:
            return atom[1] - start  # the threshold alone does not split an atom
        return atom[0] - start

    def _start(self, sequence: Sequence, prefix: int) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.status, sequence.slot = Status.RUNNING, heapq.heappop(self._free_slots)
        sequence.passed_over = 0
        self.kv.admit(sequence, prefix)

    def _stop(self, sequence: Sequence, poisoned: bool = False) -> None:
        self.running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        self.kv.release(sequence, poisoned)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate, preempting less urgent sequences where needed; False if ``sequence`` itself had to give way."""
        while not self.kv.allocate(sequence, tokens):
            victim = max(reversed(self.running), key=_urgency)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _place(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.priority, not sequence.preempted, sequence.arrival
