"""Answers about a document's pages, for the asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, Self

import grpc

from triptych.answer import ChatResult, Delta
from triptych.attempts import Attempts
from triptych.gateway.v1 import gateway_pb2
from triptych.pages_base import ACCEPTED, AHEAD, OutboxBase, PageAnswerBase, PagesBase
from triptych.pages_request import PageParts


class AsyncPageAnswer(PageAnswerBase):
    """As `PageAnswer`, with `async for` and `await answer.read()`."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopAsyncIteration
            await self._pages._advance(self)
        return self._deltas.popleft()

    async def read(self) -> ChatResult:
        """The whole answer, waiting for it.

        Raises:
            TriptychError: what was wrong with this page.
        """
        async for _ in self:
            pass
        return self.result


class AsyncPages(PagesBase[AsyncPageAnswer]):
    """As `Pages`, with `async with` and `async for`; pages of a plain iterator are taken from it on a thread."""

    _kind = AsyncPageAnswer

    def __init__(
        self,
        method: Any,
        pages: Iterable[PageParts] | AsyncIterable[PageParts],
        start: gateway_pb2.ChatPagesRequest,
        attempts: Attempts,
    ) -> None:
        source = aiter(pages) if isinstance(pages, AsyncIterable) else _on_a_thread(pages)
        super().__init__(method, source, start, attempts)

    async def __aenter__(self) -> Self:
        while True:
            self._outbox = _Outbox(self._start, self._source, asyncio.Semaphore(0))
            call = self._method(self._outbox.requests(), timeout=self._attempts.remaining(), metadata=self._attempts.metadata)
            try:
                if ACCEPTED in dict(await call.initial_metadata()):
                    self._call = call
                    self._outbox.allow(AHEAD)
                    return self
                await call.read()  # raises why the question was not taken
                raise self._truncated("the gateway ended the call before it took the question")
            except grpc.RpcError as failure:
                self._outbox.close()
                await asyncio.sleep(self._attempts.backoff(failure))
            except BaseException:
                self._outbox.close()
                call.cancel()
                raise

    async def __aexit__(self, *error: object) -> None:
        if self._call is not None:
            self._outbox.close()
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[AsyncPageAnswer]:
        return self

    async def __anext__(self) -> AsyncPageAnswer:
        """The next page's answer; what was not read of the one before is skipped."""
        while self._page is not None and not self._page._complete:
            await self._advance(self._page)
        if (page := self._next(await self._receive())) is None:
            raise StopAsyncIteration
        return page

    async def _advance(self, page: AsyncPageAnswer) -> None:
        self._take(page, await self._receive())

    async def _receive(self) -> gateway_pb2.ChatPagesResponse | None:
        if self._call is None:
            raise RuntimeError("open the pages first: `async with client.pages(...) as answers:`")
        try:
            response = await self._call.read()
        except grpc.RpcError as failure:
            raise self._attempts.error(failure, answering=True) from failure
        return response if isinstance(response, gateway_pb2.ChatPagesResponse) else None


class _Outbox(OutboxBase):
    async def requests(self) -> AsyncIterator[gateway_pb2.ChatPagesRequest]:
        """As they are allowed to go."""
        yield self._start
        while await self._allowed.acquire() and not self._closed:
            try:
                page = await anext(self._source)
                request = self._made(page)
            except StopAsyncIteration:
                return
            except Exception as failure:
                self.failure = failure
                return
            yield request


async def _on_a_thread(pages: Iterable[PageParts]) -> AsyncIterator[PageParts]:
    """Reading or drawing a page may take long; the loop goes on meanwhile."""
    source, end = iter(pages), object()
    while (page := await asyncio.to_thread(next, source, end)) is not end:
        yield page  # type: ignore[misc]
