"""A model without tensors over a real paged pool, and the engine's loop around it.

Values are integers: a token's value in a layer is a hash of everything that its attention reads through the block tables.
A wrong block, a missed copy, a wrong prefix hit or a block that was given back too early changes the tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.llm.block_manager import NO_BLOCK
from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import RowSpan, Sequence, Status

NAN = None  # not a number: whatever reads it becomes it
PLACEHOLDER, END, NAN_TOKEN, VOCAB = 1, 0, 53, 40
TEXT, ROW, KEPT, CROSSED = range(4)  # what a value stands for; numbers, since their hashes are the same in every process
Value = int | None


@dataclass(eq=False)
class Request:
    """What a client asked for, apart from where it stands.

    Attributes:
        contents: per item, what its rows say; equal where digests are equal.
        answers: per answer its sequence, the first at once and the others from the fork on.
    """

    sequence: Sequence
    contents: list[int]
    answers: list[Sequence] = field(default_factory=list)
    ended: bool = False  # aborted or poisoned: whatever came so far must be a prefix of the right answer

    def __post_init__(self) -> None:
        self.asked = self.sequence.n
        self.answers = [self.sequence]


def embedding(request: Request, sequence: Sequence, position: int) -> Value:
    """What goes into the first layer: a token's id, or the row that stands in its place."""
    if position >= len(sequence.prompt):
        return hash((TEXT, sequence.output[position - len(sequence.prompt)]))
    token = sequence.prompt[position]
    if token == NAN_TOKEN:
        return NAN
    for span, content in zip(sequence.spans, request.contents, strict=True):
        if span.offset <= position < span.offset + span.tokens and not sequence.cross_rows:
            assert span.arrived > position - span.offset, f"row {position} of {sequence.id} has not arrived"
            return hash((ROW, content, position - span.offset))
    return hash((TEXT, token))


def mix(*values: object) -> Value:
    """A hash, or NAN if any of the values is."""
    return NAN if NAN in values else hash(values)


def layer(
    group: LayerGroup, sequence: Sequence, tokens: list[int], hidden: dict[int, Value], request: Request,
    write: Callable[[int, Value], None], read: Callable[[int, int], list[Value]],
) -> dict[int, Value]:  # fmt: skip
    """Run one group's layer over the tokens of a chunk; ``write`` and ``read`` are in the group's own rows.

    Returns:
        What goes into the next layer, for those tokens that go on.
    """
    if group.kind is Kind.CROSS:
        seen = {t: sum(s.rows for s in sequence.spans if s.offset <= t) for t in tokens}
        return {t: mix(hidden[t], *read(0, seen[t])) for t in tokens}
    places = {t: t for t in tokens}
    if group.kind is Kind.PRUNED and sequence.dropped:
        end = len(sequence.prompt)
        if sequence.drop_from < end and tokens[0] <= sequence.drop_from < tokens[-1] + 1:
            judge = hidden[end - 1]
            stretch = sorted(range(sequence.drop_from, end - 1), key=lambda t: str(mix(judge, hidden[t], t)))
            gone = set(stretch[: sequence.dropped])
            tokens = [t for t in tokens if t not in gone]
        start = sequence.kept(min(places))
        places = {t: start + i for i, t in enumerate(tokens)}
    for t in tokens:
        write(places[t], mix(KEPT, hidden[t]))
    out = {}
    for t in tokens:
        atom = sequence.atom_at(t + 1)  # within an atom every token reads all of it
        last = max(p for u, p in places.items() if u < atom[1]) if atom else places[t]
        out[t] = mix(hidden[t], *read(group.first_read(places[t]), last + 1))
    return out


def layers(groups: list[LayerGroup]) -> list[int]:
    """The group of every layer: two per group that passes on every token, since only the second keeps what the first read."""
    return [i for i, g in enumerate(groups) for _ in range(2 if g.kind in (Kind.FULL, Kind.SLIDING) else 1)]


def cross_values(request: Request) -> list[Value]:
    """The rows that cross-attention reads."""
    spans = request.sequence.spans
    return [hash((CROSSED, c, i)) for s, c in zip(spans, request.contents, strict=True) for i in range(s.rows)]


def choose(value: Value, answer: int) -> Value:
    """The token that answer number ``answer`` takes."""
    return NAN if value is NAN else hash((value, answer)) % VOCAB


def expected(groups: list[LayerGroup], request: Request, answer: int) -> list[int]:
    """The answer by the shortest way: one sequence alone, plain lists, the prompt in one go. It ends at a NAN."""
    model = request.sequence
    spans = [RowSpan(s.offset, s.rows, s.rows, s.digest, s.tokens) for s in model.spans]
    s = Sequence("alone", model.prompt, model.max_tokens, model.end_token_ids, model.min_tokens, spans=spans)
    s.atoms, s.cross_rows, s.dropped, s.drop_from = model.atoms, model.cross_rows, model.dropped, model.drop_from
    model_groups = [groups[i] for i in layers(groups)]
    stores: list[list[Value]] = [cross_values(request) if g.kind is Kind.CROSS else [] for g in model_groups]
    while s.finish is None:
        tokens = list(range(s.computed, s.length))
        hidden = {t: embedding(request, s, t) for t in tokens}
        for group, store in zip(model_groups, stores, strict=True):

            def write(place: int, value: Value, store: list[Value] = store) -> None:
                assert place == len(store)
                store.append(value)

            def read(first: int, stop: int, store: list[Value] = store) -> list[Value]:
                return store[first:stop]

            hidden = layer(group, s, list(hidden), hidden, request, write, read)
        s.computed = s.length
        token = choose(hidden[s.length - 1], answer)
        if token is NAN:
            break
        s.append(token)
    return s.output


class FakeModel:
    """Runs chunks over ``pools[layer][block][row]``, which it reads and writes through block tables alone."""

    def __init__(self, kv: KvCache) -> None:
        self.kv, self.layers = kv, layers(kv.groups)
        self.pools: list[list[list[Value]]] = [[[0] * kv.block_size for _ in range(kv.groups[i].blocks)] for i in self.layers]

    def prepare(self) -> None:
        """Copies, then clearings, as they are due before a step."""
        for group, source, block in self.kv.take_copies():
            for pool in self._pools(group):
                pool[block] = list(pool[source])
        for group, block in self.kv.take_stale():
            for pool in self._pools(group):
                pool[block] = [0] * self.kv.block_size

    def run(self, chunks: list[Chunk], requests: dict[str, Request]) -> dict[str, Value]:
        """The last token's final value, per sequence."""
        last = {}
        for chunk in chunks:
            s, request = chunk.sequence, requests[chunk.sequence.id]
            tokens = range(chunk.start, chunk.start + chunk.count)
            hidden = {t: embedding(request, s, t) for t in tokens}
            for number, index in enumerate(self.layers):
                group = self.kv.groups[index]
                if group.kind is Kind.CROSS and chunk.start == s.started:
                    assert all(span.arrived == span.rows for span in s.spans), "cross rows are missing"
                    for place, value in enumerate(cross_values(request)):
                        self._write(number, s, place, value)

                def write(place: int, value: Value, number: int = number, s: Sequence = s) -> None:
                    self._write(number, s, place, value)

                def read(first: int, stop: int, number: int = number, s: Sequence = s) -> list[Value]:
                    return self._read(number, s, first, stop)

                hidden = layer(group, s, list(hidden), hidden, request, write, read)
            last[s.id] = hidden[tokens[-1]]
        return last

    def _pools(self, group: int) -> list[list[list[Value]]]:
        return [pool for pool, index in zip(self.pools, self.layers, strict=True) if index == group]

    def _write(self, number: int, s: Sequence, place: int, value: Value) -> None:
        index = self.layers[number]
        block = s.tables[index].blocks[place // self.kv.block_size]
        assert self.kv.pools[index].references(block) == 1, f"{s.id} writes block {block}, which others hold"
        self.pools[number][block][place % self.kv.block_size] = value

    def _read(self, number: int, s: Sequence, first: int, stop: int) -> list[Value]:
        """Rows ``[first, stop)``. Like attention with a mask, it also sees what stands beside them in their blocks."""
        size, rows = self.kv.block_size, list[Value]()
        if stop <= first:
            return rows
        blocks = s.tables[self.layers[number]].blocks[first // size : (stop - 1) // size + 1]
        assert NO_BLOCK not in blocks, f"{s.id} lacks a block that it reads"
        for block in blocks:
            rows += self.pools[number][block]
        head = first % size
        beside = rows[:head] + rows[head + stop - first :]
        rows = rows[head : head + stop - first]
        return [NAN] if NAN in beside else rows


class FakeEngine:
    """Schedule, run, commit, sample, as the engine does it, with every invariant checked at every step."""

    def __init__(self, scheduler: Scheduler, prompt_tokens: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.scheduler, self.kv = scheduler, scheduler.kv
        self.model = FakeModel(self.kv)
        self.requests: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.answer: dict[str, int] = {}
        self.forks = self.poisonings = 0

    def submit(self, request: Request) -> bool:
        """Queue a request unless the scheduler refuses it."""
        if self.scheduler.refusal(request.sequence):
            return False
        self.requests.append(request)
        self.by_id[request.sequence.id], self.answer[request.sequence.id] = request, 0
        self.scheduler.add(request.sequence)
        return True

    def step(self) -> list[Chunk]:
        """One step; the chunks that ran."""
        chunks = self.scheduler.schedule(self.prompt_tokens)
        self.check(chunks)
        self.model.prepare()
        last = self.model.run(chunks, self.by_id)
        sampling = [c.sequence for c in chunks if c.samples]
        self.scheduler.commit(chunks)
        for s in sampling:
            request = self.by_id[s.id]
            answers = [s]
            if s.n > 1:
                self.forks += 1
                ids = [f"{s.id}.{i}" for i in range(1, s.n)]
                answers += self.scheduler.fork(s, ids)
                for i, child in enumerate(answers[1:], 1):
                    self.by_id[child.id], self.answer[child.id] = request, i
                    request.answers.append(child)
            for a in answers:
                token = choose(last[s.id], self.answer[a.id])
                if token is NAN:
                    assert NAN_TOKEN in a.prompt or NAN_TOKEN in a.output, f"{a.id} read what is not a number"
                    self.poisonings += 1
                    request.ended = True
                    self.scheduler.finish(a, poisoned=True)
                    continue
                a.append(token)
                if a.finish:
                    self.scheduler.finish(a)
        self.scheduler.check_integrity()
        return chunks

    def abort(self, request: Request, poisoned: bool = False) -> None:
        """End every answer of a request."""
        for s in request.answers:
            if s.status is not Status.FINISHED:
                request.ended = True
                self.scheduler.finish(s, poisoned)
        self.scheduler.check_integrity()

    def check(self, chunks: list[Chunk]) -> None:
        """What must hold of every schedule."""
        scheduler, kv = self.scheduler, self.kv
        scheduler.check_integrity()
        assert sum(c.count for c in chunks) <= scheduler.token_budget
        assert len({c.sequence.id for c in chunks}) == len(chunks) <= scheduler.max_sequences
        for c in chunks:
            assert c.sequence.status is Status.RUNNING and c.count > 0 and c.start == c.sequence.computed
            assert c.sequence.atom_at(c.start) is None and c.sequence.atom_at(c.start + c.count) is None, "an atom is cut"
        for index, (group, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
            holders: dict[int, list[tuple[int, Sequence]]] = {}
            for s in scheduler.running:
                table = s.tables[index]
                if group.window is not None:
                    assert table.held <= -(-(group.window + scheduler.token_budget) // kv.block_size) + 1
                for at in range(table.first, len(table.blocks)):
                    holders.setdefault(table.blocks[at], []).append((at, s))
            assert pool.free + pool.cached + len(holders) == pool.total
            for block, held in holders.items():
                for at, s in held[1:]:
                    self._may_share(group, held[0][1], s, at == held[0][0], block)

    def _may_share(self, group: LayerGroup, one: Sequence, two: Sequence, same_place: bool, block: int) -> None:
        assert same_place, f"block {block} stands at two places"
        forked = self.by_id[one.id] is self.by_id[two.id]
        assert forked or (group.kind is not Kind.CROSS and one.cacheable and two.cacheable and one.salt == two.salt)

    def drive(self, steps: int = 3000) -> None:
        """Let every row arrive and run to the end."""
        for request in self.requests:
            for span in request.sequence.spans:
                span.arrived = span.rows
        for _ in range(steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            assert self.step(), "nothing runs though everything has arrived"
        assert not self.scheduler.running and not self.scheduler.waiting, "a sequence does not end"
        for pool in self.kv.pools:
            assert pool.available == pool.total
            pool.check_integrity([])

    def check_answers(self) -> None:
        """Every answer is the one that a direct computation gives."""
        for request in self.requests:
            for i, s in enumerate(request.answers):
                right = expected(self.kv.groups, request, i)
                assert s.output == (right[: len(s.output)] if request.ended else right), f"{s.id}: {s.output}, not {right}"
            assert request.ended or len(request.answers) == request.asked
