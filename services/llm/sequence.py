"""One sequence: its tokens, how far it has been computed, and which prompt rows have arrived. No torch, grpc or clock."""

from __future__ import annotations

import enum
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

from services.llm.block_manager import BlockTable


class Status(enum.Enum):
    """waiting: in no batch, holds no blocks. running: holds blocks and a slot. finished: over, holds none."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(enum.Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class RowSpan:
    """A media item in the prompt: its rows come from an encoder, in order.

    Attributes:
        offset: first prompt token of the item.
        rows: embeddings it has.
        arrived: how many of them are here.
        digest: names everything its keys and values depend on; without one the item is never shared.
        tokens: prompt tokens it occupies: one per row, or a single one where layers read the rows by cross-attention.
    """

    offset: int
    rows: int
    arrived: int = 0
    digest: bytes = b""
    tokens: int = -1

    def __post_init__(self) -> None:
        if self.tokens < 0:
            self.tokens = self.rows


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answer.

    Invariant: keys and values of tokens ``[0, computed)`` are in the pools, as far as anything still reads them.

    Attributes:
        end_token_ids: tokens that end the answer once it has more than ``min_tokens``.
        priority: lower is more urgent.
        n: answers wanted; the sequence stands for all of them until it forks, then for one.
        spans: media items, in order.
        atoms: sorted disjoint token ranges ``[start, end)`` that one chunk must hold whole.
        salt: sequences with different salts never share blocks.
        cross_rows: rows of the cross group. Where there are any, nothing is computed before all rows have arrived.
        drop_from, dropped: of the prompt from ``drop_from`` on, ``dropped`` tokens are not kept in the pruned group.
        cacheable: whether the sequence reads and writes the prefix cache.
        tables: one block table per layer group; empty unless running.
        slot: row of the batch while running, else -1.
        cached: prompt tokens found in the prefix cache when the sequence was first admitted.
        started: ``computed`` at the latest admission: the chunk that starts there is the first one since.
        passed_over: sequences behind this one that were admitted since it could have run.
        arrival: place in the order of arrival.
        paused: its reader lags behind; it is not computed.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    end_token_ids: frozenset[int]
    min_tokens: int = 0
    priority: int = 0
    n: int = 1
    spans: list[RowSpan] = field(default_factory=list)
    atoms: list[tuple[int, int]] = field(default_factory=list)
    salt: bytes = b""
    cross_rows: int = 0
    dropped: int = 0
    drop_from: int = 0
    cacheable: bool = True
    output: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    cached: int = -1
    started: int = 0
    status: Status = Status.WAITING
    finish: Finish | None = None
    passed_over: int = 0
    arrival: int = -1
    preempted: bool = False
    paused: bool = False
    # The KV cache's marks. Nothing has to be allocated below token `room` nor settled below `edge`; `keys` are those of
    # the leading full blocks, `published` counts the blocks offered to the prefix cache, `keyable` tokens may be.
    room: int = 0
    edge: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    keyable: int = sys.maxsize

    def __post_init__(self) -> None:
        assert self.prompt and self.max_tokens > 0 and self.n > 0 and 0 <= self.dropped <= len(self.prompt) - self.drop_from
        assert all(a.offset + a.tokens <= b.offset for a, b in pairwise(self.spans)) and self.atoms == sorted(self.atoms)
        if self.dropped:
            inside = [a for a in self.atoms if a[1] > self.drop_from]
            start = min([self.drop_from, *(a[0] for a in inside)])
            self.atoms = [*(a for a in self.atoms if a not in inside), (start, len(self.prompt))]
            self.keyable = self.drop_from
        for span in self.spans:
            if not span.digest:
                self.keyable = min(self.keyable, span.offset)
        if not self.cacheable:
            self.keyable = 0
        if atom := self.atom_at(self.keyable):
            self.keyable = atom[0]  # an atom's keys and values depend on all of it

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def ready(self) -> int:
        """Tokens, from the start, that can be computed: up to the first row that has not arrived."""
        return self.ready_after(self.computed)

    def ready_after(self, computed: int) -> int:
        """:attr:`ready` as if ``computed`` tokens were computed; items wholly among them need no rows."""
        for span in self.spans:
            if span.arrived < span.rows:
                if self.cross_rows:
                    return 0
                if span.offset + span.tokens > computed:
                    return span.offset + span.arrived
        return self.length

    def first_missing(self) -> int:
        """Where the first item with missing rows ends; nothing can be computed before a prefix reaches that far."""
        for span in self.spans:
            if span.arrived < span.rows:
                return span.offset + span.tokens
        return 0

    @property
    def decoding(self) -> bool:
        """Exactly the newest token of the answer is left to compute."""
        return bool(self.output) and self.computed == len(self.prompt) + len(self.output) - 1

    def kept(self, tokens: int) -> int:
        """Rows that the pruned group holds for the first ``tokens`` tokens; not asked for inside the pruned stretch."""
        if not self.dropped or tokens <= self.drop_from:
            return tokens
        assert tokens >= len(self.prompt), "a boundary inside the pruned stretch"
        return tokens - self.dropped

    def atom_at(self, boundary: int) -> tuple[int, int] | None:
        """The atom that a boundary before token ``boundary`` would cut."""
        if not self.atoms:
            return None
        at = bisect_left(self.atoms, (boundary, 0)) - 1  # the last atom that starts before the boundary
        return self.atoms[at] if at >= 0 and boundary < self.atoms[at][1] else None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids ``[start, stop)`` of prompt and answer."""
        prompt = len(self.prompt)
        if stop <= prompt:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - prompt) : stop - prompt]

    def append(self, token: int) -> None:
        """Take a sampled token and finish if it was the last."""
        self.output.append(token)
        if token in self.end_token_ids and len(self.output) > self.min_tokens:
            self.finish = Finish.STOP
        elif len(self.output) >= self.max_tokens:
            self.finish = Finish.LENGTH
