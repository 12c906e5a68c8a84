"""Responses of a language model to many requests arrive in one call: each reaches its own request, and none hangs on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_fakes import Fleet, TellingLlm, fleet, tokens_of, vanish
from gateway_fakes import Context, ask, until

from services.common.errors import ServiceError
from services.gateway.responses import Inbox, ResponsesLost
from services.llm.response_streams import ResponseStreams
from triptych.llm.v1 import llm_pb2

CODE = grpc.StatusCode


class SharingLlm(TellingLlm):
    """Knows streams that many requests share.

    Attributes:
        opened: streams so far.
        breaks: whether the stream ends without a word before its next message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams, self.opened, self.breaks = ResponseStreams(), 0, False

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Context) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self.streams.check(request)
        async for response in super().Generate(request, context):
            if request.HasField("response_stream"):
                await self.streams.put(request.response_stream, response)
            else:
                yield response

    async def StreamResponses(self, request: llm_pb2.StreamResponsesRequest, context: Context) -> AsyncIterator[Any]:
        async with aclosing(self.streams.read(request.stream_id)) as batches:
            async for batch in batches:
                if self.breaks:
                    self.breaks = False
                    await vanish(context)
                yield batch
                self.opened += not batch.responses


@pytest.fixture
def llama(checkpoint_dir: Callable[[str], Path]) -> Path:
    return checkpoint_dir("llama")


def delta(*tokens: int, index: int = 0) -> llm_pb2.GenerateResponse:
    return llm_pb2.GenerateResponse(delta=llm_pb2.Delta(token_ids=tokens, index=index))


async def every_llm_shares(f: Fleet) -> list[SharingLlm]:
    """Those of a fleet, once the gateway has a stream to each."""
    await until(lambda: all(llm._shared._answered.is_set() for llm in f.service.backends.llms.values()))
    return [llm for llm in f.llms.values() if isinstance(llm, SharingLlm)]


@pytest.mark.asyncio
async def test_each_request_gets_its_own(llama: Path) -> None:
    async with fleet(llama, llms=1, llm=SharingLlm) as f:
        [llm] = await every_llm_shares(f)
        answers = await asyncio.gather(*(f.answer(ask("word " * n, max_tokens=n)) for n in range(1, 9)))
        for n, events in enumerate(answers, 1):
            [prompt] = [len(request.token_ids) for request in llm.requests if request.sampling.max_tokens == n]
            assert tokens_of(events) == [TellingLlm.token(prompt, 0, place) for place in range(n)]
        places = {(request.response_stream.stream_id, request.response_stream.number) for request in llm.requests}
        assert len(places) == 8 and len({stream for stream, _ in places}) == 1 and llm.opened == 1
        await f.idle()


@pytest.mark.asyncio
async def test_several_answers_mix(llama: Path) -> None:
    async with fleet(llama, llms=1, llm=SharingLlm) as f:
        [llm] = await every_llm_shares(f)
        events = await f.answer(ask("x", max_tokens=5, n=3))
        [address] = f.llms
        assert llm.requests[0].HasField("response_stream")
        assert [tokens_of(events, index) for index in range(3)] == [f.expected(address, 5, index) for index in range(3)]


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [{"logprobs": 2}, {"include_first_logits": True}], ids=str)
async def test_what_is_more_than_tokens_comes_in_the_requests_own_call(llama: Path, more: dict[str, Any]) -> None:
    async with fleet(llama, llms=1, llm=SharingLlm) as f:
        [llm] = await every_llm_shares(f)
        events = await f.answer(ask("x", max_tokens=4, **more))
        assert len(tokens_of(events)) == 4 and not llm.requests[0].HasField("response_stream")


@pytest.mark.asyncio
async def test_an_error_comes_with_its_details(llama: Path) -> None:
    async with fleet(llama, llms=1, llm=SharingLlm) as f:
        [llm] = await every_llm_shares(f)
        llm.failures.append(lambda request: ServiceError(CODE.INTERNAL, "the step failed", reason="NAN"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await f.answer(ask("x"))
        error = ServiceError.from_rpc(raised.value, "gateway")
        assert (error.code, error.message, error.reason) == (CODE.INTERNAL, "the step failed", "NAN")
        assert llm.requests[0].HasField("response_stream")
        await f.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("silent", [False, True])
async def test_requests_of_a_stream_that_breaks_go_on_elsewhere(
    llama: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr("services.gateway.responses._REST_SECONDS", 0.3)
    async with fleet(llama, llm=SharingLlm) as f:
        llms = await every_llm_shares(f)
        for llm in llms:
            llm.gate.clear()
        call = f.stub.Chat(ask("tell", max_tokens=6), timeout=20)
        got = [await call.read(), await call.read()]
        [(address, lost)] = [(address, llm) for address, llm in f.llms.items() if llm.requests]
        assert isinstance(lost, SharingLlm)
        lost.breaks = True
        if silent:  # it says nothing of that request any more, only of others
            await lost.streams.put(llm_pb2.ResponseStream(stream_id=next(iter(lost.streams._open)), number=99), delta(1))
        for llm in llms:
            if llm is not lost or not silent:
                llm.gate.set()
        while (response := await call.read()) is not grpc.aio.EOF:
            got.append(response)
        assert tokens_of(got) == f.expected(address, 6)
        assert [llm.began for llm in llms if llm is not lost] == [[f.expected(address, 1)]]
        await until(lambda: lost.opened == 2)  # it answers polls, so it is asked again
        lost.gate.set()
        await f.idle()


@pytest.mark.asyncio
async def test_a_request_that_was_cancelled_leaves_nothing_to_the_next(llama: Path) -> None:
    async with fleet(llama, llms=1, llm=SharingLlm) as f:
        [llm] = await every_llm_shares(f)
        llm.gate.clear()
        call = f.stub.Chat(ask("tell me all", max_tokens=50), metadata=(("x-request-id", "same"),))
        while not (await call.read()).HasField("delta"):
            pass
        call.cancel()
        place = llm.requests[0].response_stream
        await f.idle()
        again = asyncio.create_task(f.answer(ask("no", max_tokens=3), metadata=(("x-request-id", "same"),)))
        await until(lambda: len(llm.requests) == 2)
        await llm.streams.put(place, delta(1, 2, 3))  # late
        llm.gate.set()
        assert tokens_of(await again) == f.expected(next(iter(f.llms)), 3)


@pytest.mark.asyncio
async def test_a_server_without_shared_streams_is_asked_once(llama: Path) -> None:
    class Older(SharingLlm):
        async def StreamResponses(self, request: llm_pb2.StreamResponsesRequest, context: Context) -> AsyncIterator[Any]:
            self.opened += 1
            async for batch in super(SharingLlm, self).StreamResponses(request, context):
                yield batch

    async with fleet(llama, llms=1, llm=Older) as f:
        [llm] = await every_llm_shares(f)
        polled = f.service.backends.llms[next(iter(f.llms))]
        for _ in range(3):
            await polled.refresh()
        assert len(tokens_of(await f.answer(ask("x", max_tokens=4)))) == 4
        assert llm.opened == 1 and not llm.requests[0].HasField("response_stream")


@pytest.mark.asyncio
async def test_a_slow_reader_finds_tokens_together() -> None:
    inbox = Inbox(llm_pb2.ResponseStream())
    admitted, done = llm_pb2.GenerateResponse(admitted={}), llm_pb2.GenerateResponse(done={"last": True})
    for response in (admitted, delta(1), delta(2), delta(5, index=1), delta(3, 4), delta(6, index=1), done):
        inbox.put(response)
    assert [await anext(inbox) for _ in range(4)] == [admitted, delta(1, 2, 3, 4), delta(5, 6, index=1), done]
    inbox.put(delta(7))
    assert await anext(inbox) == delta(7)


@pytest.mark.asyncio
async def test_what_has_arrived_is_read_before_the_error() -> None:
    inbox = Inbox(llm_pb2.ResponseStream())
    inbox.put(delta(1))
    inbox.end(ValueError("first"))
    inbox.end(ValueError("second"))
    assert await anext(inbox) == delta(1)
    with pytest.raises(ValueError, match="first"):
        await anext(inbox)


class EndedCall:
    async def read(self) -> Any:
        return grpc.aio.EOF


@pytest.mark.asyncio
async def test_a_call_that_ends_before_its_last_response_is_given_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.responses._REST_SECONDS", 0.5)
    inbox = Inbox(llm_pb2.ResponseStream()).watch(EndedCall())
    reading = asyncio.ensure_future(anext(inbox))
    await until(lambda: inbox._timer is not None)
    assert not reading.done()
    inbox.put(delta(1))
    assert await reading == delta(1)
    with pytest.raises(ResponsesLost):
        await anext(inbox)
    inbox.close()
