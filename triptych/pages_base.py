"""What both clients' answers about pages share: putting them together. It knows no channel, thread or loop."""

from collections import deque
from typing import Any, Generic, TypeVar

from triptych import errors
from triptych.answer import Answer, ChatResult, Delta
from triptych.attempts import Attempts
from triptych.gateway.v1 import gateway_pb2
from triptych.pages_request import PageParts, build_page

AHEAD = 2  # pages sent whose answers are not complete: the gateway prepares one while it answers another
ACCEPTED = "x-request-id"  # in the gateway's initial metadata: the question is fine, pages may come


class PageAnswerBase:
    """One page's answer on its way.

    Attributes:
        index: which page, from 0.
    """

    def __init__(self, pages: Any, index: int) -> None:
        self.index = index
        self._pages = pages
        self._answer = Answer(f"{pages.request_id}.{index}")
        self._error: errors.TriptychError | None = None
        self._complete = False

    @property
    def error(self) -> errors.TriptychError | None:
        """What was wrong with this page, where that was told already."""
        return self._error

    @property
    def result(self) -> ChatResult:
        """The page's answer, once it was read to its end.

        Raises:
            TriptychError: what was wrong with this page.
            RuntimeError: the answer was not read to its end.
        """
        if self._error is not None:
            raise self._error
        return self._answer.result

    @property
    def _deltas(self) -> deque[Delta]:
        return self._answer.deltas


class OutboxBase:
    """What one call sends: the start, then a page for each that is allowed."""

    def __init__(self, start: gateway_pb2.ChatPagesRequest, source: Any, allowed: Any) -> None:
        self._start, self._source, self._allowed = start, source, allowed
        self._closed = False
        self.sent = 0
        self.failure: Exception | None = None  # what the pages' iterator raised

    def allow(self, pages: int) -> None:
        """Let more pages go."""
        for _ in range(pages):
            self._allowed.release()

    def close(self) -> None:
        """Send no more."""
        self._closed = True
        self._allowed.release()

    def _made(self, page: PageParts) -> gateway_pb2.ChatPagesRequest:
        request = build_page(self.sent, page)
        self.sent += 1
        return request


PageT = TypeVar("PageT", bound=PageAnswerBase)


class PagesBase(Generic[PageT]):
    """A document on its way."""

    _kind: type[PageT]
    _outbox: OutboxBase

    def __init__(self, method: Any, source: Any, start: gateway_pb2.ChatPagesRequest, attempts: Attempts) -> None:
        self._method, self._source, self._start, self._attempts = method, source, start, attempts
        self._call: Any = None
        self._page: PageT | None = None
        self._read = 0  # pages whose answers are complete

    @property
    def request_id(self) -> str:
        """The id under which the services log this call; page N is REQUEST_ID.N."""
        return self._attempts.request_id

    def _next(self, response: gateway_pb2.ChatPagesResponse | None) -> PageT | None:
        """The page that the stream's next message begins; None where the stream has ended."""
        if response is not None:
            self._page = self._kind(self, response.page)
            self._take(self._page, response)
            return self._page
        if self._outbox.failure is not None:
            raise self._outbox.failure
        if self._read < self._outbox.sent:
            raise self._truncated(f"{self._read} of {self._outbox.sent} pages were answered when the stream ended")
        return None

    def _take(self, page: PageAnswerBase, response: gateway_pb2.ChatPagesResponse | None) -> None:
        """Add the stream's next message to the page that is read; another page may go when its answer is complete.

        Raises:
            StreamTruncated: the stream ended, or another page began, within an answer.
        """
        if response is None or response.page != page.index:
            raise self._truncated(f"the answer about page {page.index} ended before it was complete")
        if response.HasField("error"):
            page._error = errors.from_status(response.error)
        else:
            page._answer.feed(response.chat)
        page._complete = response.HasField("error") or response.chat.HasField("done")
        if page._complete:
            self._read += 1
            self._outbox.allow(1)

    def _truncated(self, message: str) -> errors.StreamTruncated:
        return errors.StreamTruncated(message, request_id=self.request_id)
