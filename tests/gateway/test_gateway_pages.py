"""Page after page through one call, with a fake encoder and a fake language model."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import Script, Stack, part, picture, refused, stack, until
from tokenizers import Tokenizer

from services.common.errors import ServiceError
from services.common.interceptor import REQUEST_ID_HEADER
from services.gateway.pages import MAX_REMEMBER, Pages
from tests.patience import PATIENCE
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

Directory = Callable[[str], Path]
Request = gateway_pb2.ChatPagesRequest
CODE = grpc.StatusCode


@pytest.fixture
def qwen(checkpoint_dir: Directory) -> Path:
    return checkpoint_dir("qwen2_vl")


def start(question: str = "What is it?", **options: Any) -> Request:
    return Request(start=gateway_pb2.PagesStart(question=question, **options))


def page(*parts: str | bytes | tuple[str, bytes], question: str = "") -> Request:
    return Request(page=gateway_pb2.Page(parts=[part(p) for p in parts], question=question))


async def pages_of(s: Stack, requests: Iterable[Request] | AsyncIterator[Request], **options: Any) -> list[Any]:
    """Every response, grouped by page; pages come one after the other."""
    pages: list[list[gateway_pb2.ChatPagesResponse]] = []
    async for response in s.stub.ChatPages(requests, **options):
        if response.page == len(pages):
            pages.append([])
        assert response.page == len(pages) - 1, "pages are mixed"
        pages[-1].append(response)
    return pages


def text_of(responses: Sequence[gateway_pb2.ChatPagesResponse]) -> str:
    assert responses[0].chat.HasField("admitted") and responses[-1].chat.HasField("done")
    return "".join(r.chat.delta.text for r in responses)


def errors_of(pages: Sequence[Sequence[gateway_pb2.ChatPagesResponse]]) -> dict[int, ServiceError]:
    return {n: ServiceError.from_proto(p[-1].error) for n, p in enumerate(pages) if p[-1].HasField("error")}


def encode(checkpoint: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids)


@pytest.mark.asyncio
async def test_every_page_is_answered_in_order(qwen: Path) -> None:
    async with stack(qwen) as s:
        s.llm.script = Script([[token] for token in encode(qwen, "one two")])
        requests = [start(), page(picture(56, 56)), page("text", picture(84, 56), question="Who?"), page("text alone")]
        call = s.stub.ChatPages(iter(requests), metadata=((REQUEST_ID_HEADER, "doc"),))
        assert dict(await call.initial_metadata())[REQUEST_ID_HEADER] == "doc"  # the start was taken
        responses = [response async for response in call]
        assert [r.page for r in responses] == sorted(r.page for r in responses)
        pages = [[r for r in responses if r.page == n] for n in range(3)]
        assert [text_of(p) for p in pages] == ["one two"] * 3
        assert [p[0].chat.admitted.request_id for p in pages] == ["doc.0", "doc.1", "doc.2"]
        assert [[(i.tokens, i.field) for i in p[0].chat.admitted.media] for p in pages] == [
            [(4, "page.parts[0].image")], [(6, "page.parts[1].image")], [],
        ]  # fmt: skip
        assert sorted(r.request_id for r in s.llm.requests) == ["doc.0", "doc.1", "doc.2"]
        tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
        prompts = [tokenizer.decode(list(r.token_ids)) for r in sorted(s.llm.requests, key=lambda r: r.request_id)]
        assert ["What is it?" in p for p in prompts] == [True, False, True] and "textWho?" in prompts[1].replace("\n", "")
        await s.idle()
        assert (await s.load()).finished_requests == 3


@pytest.mark.asyncio
async def test_a_page_that_fails_leaves_the_others_alone(qwen: Path) -> None:
    async with stack(qwen) as s:
        requests = [start(messages=[gateway_pb2.Message(role=1, parts=[part("Be brief.")])], remember=2)]
        requests += [page(picture()), page("about", b"no picture"), page(), page(("audio", b"x")), page(picture())]
        requests.append(page(*[picture()] * 9))
        pages = await pages_of(s, iter(requests))
        failed = errors_of(pages)
        assert list(failed) == [1, 2, 3, 5] and all(text_of(pages[n]) is not None for n in (0, 4))
        assert [error.field for error in failed.values()] == ["page.parts[1].image", "page.parts", "page.parts[0].audio", "page"]
        assert all(e.code is CODE.INVALID_ARGUMENT and e.message.startswith(e.field or "?") for e in failed.values())
        s.encoder.error = ServiceError(
            CODE.INVALID_ARGUMENT, "messages[1].parts[0].image: bad", field="messages[1].parts[0].image"
        )
        pages = await pages_of(s, iter([start(messages=requests[0].start.messages), page(picture()), page("text")]))
        assert errors_of(pages)[0].message == "page.parts[0].image: bad" and pages[0][0].chat.HasField("admitted")
        assert text_of(pages[1]) is not None
        await s.idle()


@pytest.mark.asyncio
async def test_a_bug_is_one_page_s_and_opaque(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(qwen) as s:
        answer, chat = s.service._servicer._chat.answer, s.service._servicer._chat

        def buggy(request: gateway_pb2.ChatRequest, *rest: Any) -> Any:
            if request.messages[-1].parts[0].text == "bug":
                raise RuntimeError("object at 0x7f00deadbeef")
            return answer(request, *rest)

        monkeypatch.setattr(chat, "answer", buggy)
        pages = await pages_of(s, iter([start(), page("bug"), page("fine")]), metadata=((REQUEST_ID_HEADER, "doc"),))
        error = errors_of(pages)[0]
        assert error.code is CODE.INTERNAL and "doc.0" in error.message and "0x" not in error.message
        assert text_of(pages[1]) is not None


WRONG_STARTS = [
    ([], CODE.INVALID_ARGUMENT, "start: must come first"),
    ([page("x")], CODE.INVALID_ARGUMENT, "start: must come first"),
    ([Request()], CODE.INVALID_ARGUMENT, "start: must come first"),
    ([start(model="other")], CODE.NOT_FOUND, "model"),
    ([start(sampling=sampling_pb2.SamplingParams(n=2))], CODE.INVALID_ARGUMENT, "sampling.n"),
    ([start(sampling=sampling_pb2.SamplingParams(top_p=7))], CODE.INVALID_ARGUMENT, "sampling.top_p"),
    ([start(remember=MAX_REMEMBER + 1)], CODE.INVALID_ARGUMENT, "remember"),
    ([start(messages=[gateway_pb2.Message(role=1)])], CODE.INVALID_ARGUMENT, "messages[0].parts"),
    ([start(cache_salt="x" * 129)], CODE.INVALID_ARGUMENT, "cache_salt"),
]


@pytest.mark.asyncio
async def test_a_wrong_start_ends_the_call(qwen: Path) -> None:
    async with stack(qwen) as s:
        for requests, code, text in WRONG_STARTS:
            with refused(code, text):
                await pages_of(s, iter(requests))
        assert not s.llm.requests


@pytest.mark.asyncio
async def test_no_page_is_no_error_and_a_second_start_is_one(qwen: Path) -> None:
    async with stack(qwen) as s:
        assert await pages_of(s, iter([start()])) == []
        seen = []
        with refused(CODE.INVALID_ARGUMENT, "page: only pages may follow"):
            async for response in s.stub.ChatPages(iter([start(), page("x"), start()])):
                seen.append(response)
        assert text_of(seen) is not None  # what was sent before is answered
        await s.idle()


class FakeAnswers:
    """Answers requests when ``go_on`` says so, and knows which were begun and which were left."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.requests: list[gateway_pb2.ChatRequest] = []
        self.errors: list[ServiceError] = []  # of the next requests, before they are admitted
        self.left = 0

    async def __call__(self, request: gateway_pb2.ChatRequest) -> AsyncGenerator[gateway_pb2.ChatResponse, None]:
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        finished = False
        try:
            yield gateway_pb2.ChatResponse(admitted=gateway_pb2.Admitted())
            await self.go_on.wait()
            yield gateway_pb2.ChatResponse(delta=gateway_pb2.Delta(text=f"answer {len(self.requests)}"))
            yield gateway_pb2.ChatResponse(done=gateway_pb2.Done())
            finished = True
        finally:
            self.left += not finished


class Sender:
    """A client's pages, counted as they are read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    async def __aiter__(self) -> AsyncIterator[Request]:
        for number in range(self.count):
            self.read += 1
            yield page(f"page {number}")


async def turns(count: int = 50) -> None:
    """Let everything run that can, in a process where nothing waits for IO."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize(("remember", "ahead"), [(0, 2), (3, 1)])
async def test_no_more_is_read_than_one_page_ahead(remember: int, ahead: int) -> None:
    answers, sender = FakeAnswers(), Sender(500)
    started = gateway_pb2.PagesStart(question="what?", remember=remember)
    stream = Pages(started, aiter(sender), answers, "id").answers()
    assert (await anext(stream)).chat.HasField("admitted")
    await turns()
    assert sender.read == len(answers.requests) == ahead
    answers.go_on.set()
    done = 0
    async for response in stream:
        done += response.chat.HasField("done")
        await turns(5)
        assert sender.read - done <= ahead
    assert done == sender.read == 500


@pytest.mark.asyncio
async def test_the_next_page_waits_until_one_is_admitted() -> None:
    """Else the next could take the room for which the one before it waits, and neither would go on."""
    answers, sender = FakeAnswers(), Sender(3)
    answers.errors = [ServiceError(CODE.RESOURCE_EXHAUSTED, "full", retry_delay=3600.0)]
    stream = Pages(gateway_pb2.PagesStart(), aiter(sender), answers, "id").answers()
    waiting = asyncio.ensure_future(anext(stream))
    await turns()
    assert sender.read == len(answers.requests) == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.asyncio
async def test_a_refusal_for_now_is_waited_out_three_times_at_most() -> None:
    answers, full = FakeAnswers(), ServiceError(CODE.RESOURCE_EXHAUSTED, "full", retry_delay=0.0)
    answers.go_on.set()
    answers.errors = [full, full]
    responses = [r async for r in Pages(gateway_pb2.PagesStart(), aiter(Sender(1)), answers, "id").answers()]
    assert text_of(responses) == "answer 3"
    answers.errors = [full, full, full]
    [failed, *others] = [r async for r in Pages(gateway_pb2.PagesStart(), aiter(Sender(2)), answers, "id").answers()]
    assert failed.error.message == "full" and len(answers.requests) == 3 + 3 + 1 and text_of(others)


@pytest.mark.asyncio
async def test_room_for_one_page_is_enough() -> None:
    """As where a key may have one request at once: the next page waits for the one before, however often it is refused."""
    answers, running, refusals = FakeAnswers(), 0, 0

    async def one_at_once(request: gateway_pb2.ChatRequest) -> AsyncGenerator[gateway_pb2.ChatResponse, None]:
        nonlocal running, refusals
        if running:
            refusals += 1
            raise ServiceError(CODE.RESOURCE_EXHAUSTED, "one at once", retry_delay=3600.0)
        running += 1
        try:
            async for response in answers(request):
                yield response
        finally:
            running -= 1

    stream = Pages(gateway_pb2.PagesStart(), aiter(Sender(20)), one_at_once, "id").answers()
    responses = [await anext(stream)]
    await turns()
    assert refusals == 1  # of the second page, which now waits
    answers.go_on.set()
    responses += [r async for r in stream]
    assert [r.page for r in responses if r.chat.HasField("done")] == list(range(20)) and len(answers.requests) == 20


@pytest.mark.asyncio
async def test_earlier_answers_are_remembered_without_their_media() -> None:
    async def sender() -> AsyncIterator[Request]:
        for number in range(4):
            yield page(f"page {number}", b"picture")

    answers = FakeAnswers()
    answers.go_on.set()
    started = start(messages=[gateway_pb2.Message(role=1, parts=[part("Be brief.")])], remember=2).start
    assert len([r async for r in Pages(started, sender(), answers, "id").answers()]) == 12
    said = [[(m.role, [p.text or p.WhichOneof("content") for p in m.parts]) for m in r.messages] for r in answers.requests]
    remembered = [[(2, [f"page {n}", "What is it?"]), (3, [f"answer {n + 1}"])] for n in range(3)]
    last = (2, ["page 3", "image", "What is it?"])
    assert said[0] == [(1, ["Be brief."]), (2, ["page 0", "image", "What is it?"])]
    assert said[3] == [(1, ["Be brief."]), *remembered[1], *remembered[2], last]


@pytest.mark.asyncio
async def test_memories_for_which_there_is_no_room_are_dropped() -> None:
    answers, long = FakeAnswers(), ServiceError(CODE.INVALID_ARGUMENT, "messages: long", reason="CONTEXT_LENGTH_EXCEEDED")
    answers.go_on.set()
    stream = Pages(gateway_pb2.PagesStart(remember=5), aiter(Sender(4)), answers, "id").answers()
    async for response in stream:
        if response.page == 2 and response.chat.HasField("done"):
            answers.errors = [long, long]
    assert [len(r.messages) for r in answers.requests] == [1, 3, 5, 7, 5, 3]
    answers.errors = [long] * 3
    responses = [r async for r in Pages(gateway_pb2.PagesStart(remember=1), aiter(Sender(1)), answers, "id").answers()]
    assert [r.error.message for r in responses] == ["messages: long"]  # without memories it is the page itself


@pytest.mark.asyncio
async def test_hundreds_of_pages_take_no_more_memory_than_a_few(qwen: Path) -> None:
    size = 2**20

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async def sender(count: int) -> AsyncIterator[Request]:
        yield start()
        for number in range(count):
            yield page(picture() + number.to_bytes(2, "big") + bytes(size))

    async with stack(qwen) as s:
        await pages_of(s, sender(20))
        before, seen = resident(), 0
        async for response in s.stub.ChatPages(sender(200), timeout=60):
            seen += response.chat.HasField("done")
            s.encoder.items.clear()  # the fake would keep every picture
        assert seen == 200 and resident() - before < 60 * size
        await s.idle()


@pytest.mark.asyncio
async def test_leaving_ends_both_pages(qwen: Path) -> None:
    async with stack(qwen) as s:
        before = await s.load()
        s.llm.gate.clear()
        call = s.stub.ChatPages(iter([start(), *(page(picture(56, 56 + 2 * n)) for n in range(9))]))
        await until(lambda: s.llm.running == 2)
        assert (await s.load()).running_requests == 2
        call.cancel()
        await until(lambda: s.llm.cancelled == 2)
        await s.idle()
        async with asyncio.timeout(PATIENCE):
            while await s.load() != before:  # tasks, too
                await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_the_call_s_deadline_is_every_page_s(qwen: Path) -> None:
    async with stack(qwen) as s:
        s.llm.gate.clear()
        with refused(CODE.DEADLINE_EXCEEDED):
            await pages_of(s, iter([start(), page("x"), page("y")]), timeout=2)
        await until(lambda: s.llm.cancelled == 2)
        await s.idle()


@pytest.mark.asyncio
async def test_a_passed_deadline_is_no_page_s_error() -> None:
    answers = FakeAnswers()
    answers.errors = [ServiceError(CODE.DEADLINE_EXCEEDED, "the request's deadline passed")]
    with refused(CODE.DEADLINE_EXCEEDED):
        _ = [r async for r in Pages(gateway_pb2.PagesStart(), aiter(Sender(9)), answers, "id").answers()]


@pytest.mark.asyncio
async def test_the_next_page_is_encoded_while_one_is_answered(qwen: Path) -> None:
    async with stack(qwen) as s:
        s.llm.gate.clear()
        call = s.stub.ChatPages(iter([start(), page(picture(56, 56)), page(picture(84, 84)), page(picture(112, 112))]))
        await until(lambda: s.llm.running == 2)
        assert [item.expected_rows for item in s.encoder.items] == [4, 9]
        s.llm.gate.set()
        assert [r.page for r in [r async for r in call] if r.chat.HasField("done")] == [0, 1, 2]
        await s.idle()
