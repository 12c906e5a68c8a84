"""Answers about a document's pages, for the blocking client: pages go out on gRPC's thread, answers come in on the caller's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import grpc

from triptych.answer import ChatResult, Delta
from triptych.attempts import Attempts
from triptych.gateway.v1 import gateway_pb2
from triptych.pages_base import ACCEPTED, AHEAD, OutboxBase, PageAnswerBase, PagesBase
from triptych.pages_request import PageParts


class PageAnswer(PageAnswerBase):
    """One page's answer, read as it is made: iterating yields its deltas, and raises what was wrong with the page."""

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopIteration
            self._pages._advance(self)
        return self._deltas.popleft()

    def read(self) -> ChatResult:
        """The whole answer, waiting for it.

        Raises:
            TriptychError: what was wrong with this page.
        """
        for _ in self:
            pass
        return self.result


class Pages(PagesBase[PageAnswer]):
    """Answers about pages, in order. Entering waits until the gateway has taken the question; leaving cancels the rest.

    A page is taken from the iterator when at most one before it has no complete answer. Raises, on entering and while reading:
        TriptychError: what ends the call; what is wrong with one page is raised by that page's answer.
        Exception: whatever the iterator of pages raised, after the answers about the pages before.
    """

    _kind = PageAnswer

    def __init__(
        self, method: Callable[..., Any], pages: Iterable[PageParts], start: gateway_pb2.ChatPagesRequest, attempts: Attempts
    ) -> None:
        super().__init__(method, iter(pages), start, attempts)

    def __enter__(self) -> Self:
        while True:
            self._outbox = _Outbox(self._start, self._source, threading.Semaphore(0))
            call = self._method(self._outbox.requests(), timeout=self._attempts.remaining(), metadata=self._attempts.metadata)
            try:
                if ACCEPTED in dict(call.initial_metadata()):
                    self._call = call
                    self._outbox.allow(AHEAD)
                    return self
                next(call, None)  # raises why the question was not taken
                raise self._truncated("the gateway ended the call before it took the question")
            except grpc.RpcError as failure:
                self._outbox.close()
                time.sleep(self._attempts.backoff(failure))
            except BaseException:
                self._outbox.close()
                call.cancel()
                raise

    def __exit__(self, *error: object) -> None:
        if self._call is not None:
            self._outbox.close()
            self._call.cancel()

    def __iter__(self) -> Iterator[PageAnswer]:
        return self

    def __next__(self) -> PageAnswer:
        """The next page's answer; what was not read of the one before is skipped."""
        while self._page is not None and not self._page._complete:
            self._advance(self._page)
        if (page := self._next(self._receive())) is None:
            raise StopIteration
        return page

    def _advance(self, page: PageAnswer) -> None:
        self._take(page, self._receive())

    def _receive(self) -> gateway_pb2.ChatPagesResponse | None:
        if self._call is None:
            raise RuntimeError("open the pages first: `with client.pages(...) as answers:`")
        try:
            response: gateway_pb2.ChatPagesResponse | None = next(self._call, None)
        except grpc.RpcError as failure:
            raise self._attempts.error(failure, answering=True) from failure
        return response


class _Outbox(OutboxBase):
    def requests(self) -> Iterator[gateway_pb2.ChatPagesRequest]:
        """As they are allowed to go."""
        yield self._start
        while self._allowed.acquire() and not self._closed:
            try:
                page = next(self._source)
                request = self._made(page)
            except StopIteration:
                return
            except Exception as failure:
                self.failure = failure
                return
            yield request
