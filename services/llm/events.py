"""What the engine tells a request's owner, and the bounded buffer between the engine's thread and the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.llm.logprobs import Choice
from services.llm.sequence import Finish


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request will run."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely each prompt token but the first was."""

    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of answer ``index``; ``logits`` ``[1, vocab]`` on the first where they were asked for."""

    index: int
    choice: Choice
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Answer ``index`` is complete; ``last``: all are. Times are seconds; None where the stage never happened."""

    index: int
    last: bool
    reason: Finish
    completion_tokens: int
    cached_tokens: int
    wait_for_rows: float | None
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The embedding rows will not come."""

    error: BaseException


class EngineFailure(Exception):
    """The step that held this request failed, or its logits were not numbers. The text is for the client."""


class Refused(Exception):
    """The request can never run here, or not to its end. The text is for the client, about ``field``."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class Aborted(Exception):
    """Somebody else ended the request."""


Event = Accepted | PromptScores | Token | Finished | FetchFailed | EngineFailure | Refused | Aborted


class Stream:
    """A request's events on their way to the one that reads them.

    The engine's thread counts what it sends, the event loop what was read; each writes only its own counter. A sequence
    whose stream is full is not computed until the reader has caught up to half of ``capacity``.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.sent = self.read = 0
        self.lagged = False  # set by the engine's thread when it pauses the request, unset when it goes on
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the engine should stop producing."""
        return self.sent - self.read >= self.capacity

    @property
    def caught_up(self) -> bool:
        """Whether it may go on."""
        return self.sent - self.read <= self.capacity // 2

    def put(self, event: Event) -> None:
        """Hand over an event; on the event loop."""
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> Sequence[Event]:
        """All events that are there, at least one."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        taken = list(self._events)
        self._events.clear()
        self.read += len(taken)
        return taken
