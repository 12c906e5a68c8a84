"""What both clients' answers about pages share: putting them together. It knows no channel, thread or loop."""

from collections import deque

from triptych import errors
from triptych.answer import Answer, ChatResult, Delta
from triptych.attempts import Attempts
from triptych.gateway.v1 import gateway_pb2

AHEAD = 2  # pages sent whose answers are not complete: the gateway prepares one while it answers another
ACCEPTED = "x-request-id"  # in the gateway's initial metadata: the question is fine, pages may come


class PageAnswerBase:
    """One page's answer on its way.

    Attributes:
        index: which page, from 0.
    """

    def __init__(self, index: int, request_id: str) -> None:
        self.index = index
        self._answer = Answer(request_id)
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


class PagesBase:
    """A document on its way."""

    def __init__(self, start: gateway_pb2.ChatPagesRequest, attempts: Attempts) -> None:
        self._start, self._attempts = start, attempts
        self._read = 0  # pages whose answers are complete

    @property
    def request_id(self) -> str:
        """The id under which the services log this call; page N is REQUEST_ID.N."""
        return self._attempts.request_id

    def _feed(self, page: PageAnswerBase, response: gateway_pb2.ChatPagesResponse | None) -> bool:
        """Add the stream's next message to the page that is read; says whether its answer is now complete.

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
        self._read += page._complete
        return page._complete

    def _finish(self, sent: int) -> None:
        """Say that the stream has ended."""
        if self._read < sent:
            raise self._truncated(f"{self._read} of {sent} pages were answered when the stream ended")

    def _truncated(self, message: str) -> errors.StreamTruncated:
        return errors.StreamTruncated(message, request_id=self.request_id)
