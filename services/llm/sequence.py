"""One sequence: its tokens, how far it has been computed, and which prompt rows have arrived. No torch, grpc or clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    """waiting: in no batch, holds no blocks. running: holds blocks. finished: over, holds none."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(enum.Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass
class RowSpan:
    """A run of prompt tokens whose embeddings come from an encoder; rows arrive in order within the span."""

    offset: int
    rows: int
    arrived: int = 0


@dataclass
class Sequence:
    """A prompt and its answer.

    Invariant: ``computed <= ready``; the keys and values of tokens ``[0, computed)`` are in the pool.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    end_token_ids: frozenset[int]
    min_tokens: int = 0
    spans: list[RowSpan] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    status: Status = Status.WAITING
    finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def ready(self) -> int:
        """Tokens, from the start, whose embeddings are at hand: up to the first row that has not arrived."""
        for span in self.spans:
            if span.arrived < span.rows:
                return span.offset + span.arrived
        return self.length

    @property
    def decoding(self) -> bool:
        """Exactly the newest token of the answer is left to compute."""
        return bool(self.output) and self.computed == self.length - 1

    def append(self, token: int) -> None:
        """Take a sampled token and finish if it was the last."""
        self.output.append(token)
        if token in self.end_token_ids and len(self.output) > self.min_tokens:
            self.finish = Finish.STOP
        elif len(self.output) >= self.max_tokens:
            self.finish = Finish.LENGTH
