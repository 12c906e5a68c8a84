"""One question about every page of a document, whatever their number: each page is a request of its own, answered in order.

At most two pages are held: the one whose answer is sent, and the next, whose pictures are encoded meanwhile. The next begins
only when the one before was admitted, so it never takes the room for which that one waits. Where answers are remembered a
page's prompt holds the answer before it, and there is one page at a time. How a request is answered is not known here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

import grpc

from services.common import logs
from services.common.errors import ServiceError, invalid
from services.common.interceptor import explained
from triptych.gateway.v1 import gateway_pb2

Requests = AsyncIterator[gateway_pb2.ChatPagesRequest]
Answer = Callable[[gateway_pb2.ChatRequest], AsyncGenerator[gateway_pb2.ChatResponse, None]]
Turns = tuple[gateway_pb2.Message, gateway_pb2.Message]

MAX_REMEMBER = 64
_MAX_TRIES = 3  # of a page that is refused for now
_AHEAD = 256  # responses of the next page that are kept; then its answer waits
_LONGEST_ID = 112  # characters kept of the call's id; a page's number follows
_TOO_LONG = ("CONTEXT_LENGTH_EXCEEDED", "KV_CAPACITY_EXCEEDED")


async def read_start(requests: Requests) -> gateway_pb2.PagesStart:
    """The start, which comes first.

    Raises:
        ServiceError: INVALID_ARGUMENT about the order of what was sent, ``remember`` or ``sampling.n``.
    """
    first = await anext(requests, None)
    if first is None or first.WhichOneof("event") != "start":
        raise invalid("start", "must come first; send what is asked of every page, then the pages")
    start = first.start
    if start.sampling.n > 1:
        raise invalid("sampling.n", f"must be 1 for pages, got {start.sampling.n}")
    if start.remember > MAX_REMEMBER:
        text = f"must be at most {MAX_REMEMBER}, got {start.remember}"
        raise invalid("remember", text, reason="TOO_MANY", limit=MAX_REMEMBER, requested=start.remember)
    return start


def opening(start: gateway_pb2.PagesStart) -> gateway_pb2.ChatRequest:
    """The question without a page: what is wrong with it is wrong with every page."""
    question = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.Part(text=start.question)])
    return gateway_pb2.ChatRequest(
        model=start.model, messages=[*start.messages, question], sampling=start.sampling, cache_salt=start.cache_salt
    )


@dataclass(frozen=True)
class _Page:
    """A page that was begun, and what is to be sent of it; None ends it, an error ends the call."""

    number: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)  # or answered
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # or failed
    responses: asyncio.Queue[gateway_pb2.ChatPagesResponse | ServiceError | None] = field(
        default_factory=lambda: asyncio.Queue(_AHEAD)
    )


class Pages:
    """One document.

    Args:
        start: what is asked of every page, checked.
        requests: the pages.
        answer: answers a request under the log's request id; closing the iterator ends it.
        request_id: the call's.
    """

    def __init__(self, start: gateway_pb2.PagesStart, requests: Requests, answer: Answer, request_id: str) -> None:
        self._start, self._requests, self._answer, self._request_id = start, requests, answer, request_id
        self._memory: deque[Turns] = deque(maxlen=start.remember)
        self._room = asyncio.Semaphore(1 if start.remember else 2)  # one is taken for each page held
        self._begun: asyncio.Queue[_Page | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self) -> AsyncGenerator[gateway_pb2.ChatPagesResponse, None]:
        """Page after page, each from admitted to done or an error; closing the iterator ends them all.

        Raises:
            ServiceError: DEADLINE_EXCEEDED, or INVALID_ARGUMENT about what was sent instead of a page.
        """
        reading = self._spawn(self._read())
        try:
            while (page := await self._begun.get()) is not None:
                while (response := await page.responses.get()) is not None:
                    if isinstance(response, ServiceError):
                        raise response
                    yield response
                self._room.release()
            await reading
        finally:
            running = tuple(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self) -> None:
        """Begin pages as there is room for them."""
        before = None
        try:
            for number in count():
                await self._room.acquire()
                request = await anext(self._requests, None)
                if request is None:
                    return
                if request.WhichOneof("event") != "page":
                    raise invalid("page", "only pages may follow the start")
                page = _Page(number)
                self._begun.put_nowait(page)
                self._spawn(self._run(page, request.page, before))
                await page.admitted.wait()
                before = page
        finally:
            self._begun.put_nowait(None)

    async def _run(self, page: _Page, asked: gateway_pb2.Page, before: _Page | None) -> None:
        """Answer one page; whatever happens to it is told, and no other page's matter."""
        request_id = f"{self._request_id[:_LONGEST_ID]}.{page.number}"
        logs.request_id.set(request_id)
        try:
            text = ""
            async with aclosing(self._ask(asked, before)) as responses:
                async for response in responses:
                    page.admitted.set()
                    text += response.delta.text
                    await page.responses.put(gateway_pb2.ChatPagesResponse(page=page.number, chat=response))
            self._memory.append(self._turns(asked, text))
        except Exception as error:
            told = explained(error, request_id, page=page.number)
            if told.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # every page has the call's deadline
                await page.responses.put(told)
            else:
                status = told.to_proto(request_id)
                await page.responses.put(gateway_pb2.ChatPagesResponse(page=page.number, error=status))
        page.admitted.set()
        page.answered.set()
        await page.responses.put(None)

    async def _ask(self, asked: gateway_pb2.Page, before: _Page | None) -> AsyncGenerator[gateway_pb2.ChatResponse, None]:
        """One page's answer. Memories for which there is no room are dropped, oldest first. A refusal for now is waited out: the
        page before, while it is answered, may be what takes the room."""
        if not asked.parts:
            raise invalid("page.parts", "is empty; send at least one part")
        tries_left, admitted = _MAX_TRIES, False
        while True:
            request, path = self._request(asked)
            try:
                async with aclosing(self._answer(request)) as responses:
                    async for response in responses:
                        admitted = True
                        for item in response.admitted.media:
                            item.field = item.field.replace(path, "page", 1)
                        yield response
                return
            except ServiceError as error:
                refused_for_now = not admitted and error.retry_delay is not None
                if not admitted and error.reason in _TOO_LONG and self._memory:
                    self._memory.popleft()
                elif refused_for_now and before is not None and not before.answered.is_set():
                    await before.answered.wait()
                elif refused_for_now and tries_left > 1:
                    tries_left -= 1
                    await asyncio.sleep(error.retry_delay or 0.0)
                else:
                    _rename(error, path)
                    raise

    def _request(self, asked: gateway_pb2.Page) -> tuple[gateway_pb2.ChatRequest, str]:
        """What a page stands for, and the path of the page's own message in it."""
        request = opening(self._start)
        del request.messages[-1]
        for turns in self._memory:
            request.messages.extend(turns)
        page = request.messages.add(role=gateway_pb2.ROLE_USER, parts=asked.parts)
        if question := asked.question or self._start.question:
            page.parts.add(text=question)
        return request, f"messages[{len(request.messages) - 1}]"

    def _turns(self, asked: gateway_pb2.Page, text: str) -> Turns:
        """What is remembered of a page: its texts, the question and the answer."""
        question = asked.question or self._start.question
        parts = [*(part for part in asked.parts if part.HasField("text")), gateway_pb2.Part(text=question)]
        return (
            gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts),
            gateway_pb2.Message(role=gateway_pb2.ROLE_ASSISTANT, parts=[gateway_pb2.Part(text=text)]),
        )


def _rename(error: ServiceError, path: str) -> None:
    """Let the error be about the page instead of the request that was made of it: the rest was fine without it."""
    path = "messages" if error.field == "messages" else path
    if error.field is not None and error.field.startswith(path):
        error.field = error.field.replace(path, "page", 1)
        error.message = error.message.replace(path, "page", 1)
