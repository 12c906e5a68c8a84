"""What is sent about a document: the question that is asked of every page, then the pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from triptych.content import MediaPart, Messages, Part, user
from triptych.errors import InvalidArgument
from triptych.gateway.v1 import gateway_pb2
from triptych.request import Options, Sampling, build


@dataclass(frozen=True)
class Page:
    """A page of a document, or a segment of a video or recording; `question` is asked of it instead of the one for all pages."""

    parts: tuple[Part, ...]
    question: str = ""


PageParts: TypeAlias = Page | Part | list[Part] | tuple[Part, ...]


def page(*parts: Part, question: str = "") -> Page:
    """A page with several parts, or with a question of its own."""
    return Page(parts, question)


class PagesOptions(Sampling, total=False):
    """What a call about pages takes besides its question and pages.

    messages: come before each page: instructions, or an example with its answer.
    remember: how many earlier pages' questions and answers come before a page; 0, the default, asks of each page alone.
    timeout: seconds for all pages together; None means an hour.
    model, request_id, cache_salt: as in `Options`.
    """

    messages: Messages
    remember: int
    model: str
    timeout: float | None
    request_id: str | None
    cache_salt: str


def build_start(question: str, options: PagesOptions) -> gateway_pb2.ChatPagesRequest:
    """What is asked of every page.

    Raises:
        InvalidArgument: a message or option that has no place in a request.
        TypeError: an unknown option.
    """
    if unknown := options.keys() - PagesOptions.__annotations__.keys():
        raise TypeError(f"unknown option {min(unknown)!r}; there are {', '.join(sorted(PagesOptions.__annotations__))}")
    before = options.get("messages") or []
    turns = [user(before)] if isinstance(before, str | MediaPart) else before
    if turns and not any(isinstance(turn, dict) and "role" in turn for turn in turns):
        turns = [user(*turns)]
    shared: Options = {name: value for name, value in options.items() if name in Options.__annotations__}  # type: ignore[assignment]
    request = build(gateway_pb2.ChatRequest, [*turns, user(question)], shared)
    start = gateway_pb2.PagesStart(
        model=request.model,
        messages=request.messages[:-1],
        question=question,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
    )
    try:
        start.remember = options.get("remember", 0)
    except (TypeError, ValueError) as error:
        text = f"{options['remember']!r} is not allowed: {error}"
        raise InvalidArgument(f"remember: {text}", violations=(("remember", text),)) from error
    return gateway_pb2.ChatPagesRequest(start=start)


def build_page(index: int, given: PageParts) -> gateway_pb2.ChatPagesRequest:
    """A page, counted from 0.

    Raises:
        InvalidArgument: a part that has no place in a request, or more than 64 MiB.
    """
    if not isinstance(given, Page):
        given = Page(tuple(given) if isinstance(given, list | tuple) else (given,))
    parts: Sequence[Part] = [*given.parts, given.question]
    try:
        (message,) = build(gateway_pb2.ChatRequest, [user(*parts)], {}).messages
    except InvalidArgument as error:
        violations = tuple((path.replace("messages[0]", f"pages[{index}]"), text) for path, text in error.violations)
        raise InvalidArgument(error.message.replace("messages[0]", f"pages[{index}]"), violations=violations) from error
    return gateway_pb2.ChatPagesRequest(page=gateway_pb2.Page(parts=message.parts[:-1], question=given.question))
