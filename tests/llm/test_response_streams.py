"""One stream carries the responses to many requests: a message for a step, and a request's end is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.llm.events import Accepted, Finished, Stream, Token
from services.llm.logprobs import Choice
from services.llm.response_streams import ResponseStreams
from services.llm.sequence import Finish
from tests.llm.test_service import Running, running, withheld
from tests.patience import PATIENCE
from triptych.common.v1 import sampling_pb2
from triptych.llm.v1 import llm_pb2

CODE = grpc.StatusCode


def place(number: int, stream: str = "s") -> llm_pb2.ResponseStream:
    return llm_pb2.ResponseStream(stream_id=stream, number=number)


def long(max_tokens: int, **more: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@asynccontextmanager
async def opened(llm: Running, name: str = "s") -> AsyncIterator[Any]:
    """A stream that has said that it is open."""
    call = llm.stub.StreamResponses(llm_pb2.StreamResponsesRequest(stream_id=name), timeout=60)
    assert await call.read() == llm_pb2.ResponseBatch()
    try:
        yield call
    finally:
        call.cancel()


@pytest.mark.asyncio
async def test_a_step_of_many_is_one_message(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as llm, opened(llm) as stream:
        requests = [llm.request(f"r{n}", token_ids=range(5, 10 + n), sampling=long(20)) for n in range(8)]
        own = [await llm.tokens(request) for request in requests]
        for number, request in enumerate(requests):
            request.response_stream.CopyFrom(place(number))
        ends = [asyncio.create_task(llm.tokens(request)) for request in requests]
        got: dict[int, list[llm_pb2.GenerateResponse]] = {number: [] for number in range(8)}
        batches, over = 0, 0
        while over < 8:
            batch = await stream.read()
            batches += 1
            for numbered in batch.responses:
                got[numbered.number].append(numbered.response)
                over += numbered.response.HasField("done")
        assert [[t for r in got[number] for t in r.delta.token_ids] for number in range(8)] == own
        assert all(r[0].HasField("admitted") and r[-1].done.last for r in got.values())
        assert await asyncio.gather(*ends) == [[]] * 8
        assert batches < 8 * 20 / 2, "a message for each token"
        await llm.check_free()


@pytest.mark.asyncio
async def test_what_is_refused(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as llm, opened(llm):
        wrong, alone = CODE.INVALID_ARGUMENT, "tokens alone"
        for changes, code, words in (
            ({"response_stream": place(1, "other")}, CODE.UNAVAILABLE, "response_stream: no stream of this name is open"),
            ({"response_stream": place(1), "sampling": long(3, logprobs=0)}, wrong, alone),
            ({"response_stream": place(1), "sampling": long(3, prompt_logprobs=1)}, wrong, alone),
            ({"response_stream": place(1), "sampling": long(3, include_first_logits=True)}, wrong, alone),
            ({"response_stream": place(1), "token_ids": []}, wrong, "token_ids"),
        ):
            error = await llm.error(llm.request(**changes))
            assert error.code() == code and words in str(error.details()), (changes, error)
        for name, code, words in (("", wrong, "128"), ("x" * 129, wrong, "129"), ("s", CODE.ALREADY_EXISTS, "open")):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await llm.stub.StreamResponses(llm_pb2.StreamResponsesRequest(stream_id=name), timeout=20).read()
            assert raised.value.code() == code and words in str(raised.value.details())
        await llm.check_free()


@pytest.mark.asyncio
async def test_a_stream_that_is_cancelled_ends_its_requests(checkpoint_dir: Callable[[str], Path]) -> None:
    async with withheld(checkpoint_dir("qwen2_vl")) as (llm, encoder, release):
        async with opened(llm) as stream:
            call = llm.stub.Generate(llm.request("r", encoder=encoder, response_stream=place(7)), timeout=60)
            assert (await stream.read()).responses[0].response.HasField("admitted")
        async with asyncio.timeout(PATIENCE):
            while llm.service.servicer._streams._open:
                await asyncio.sleep(0.01)
        release.set()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() == CODE.UNAVAILABLE
        await llm.check_free()
        async with opened(llm):  # the name is free again
            pass


@pytest.mark.asyncio
async def test_admitted_comes_before_tokens_that_are_there_at_the_same_time(checkpoint_dir: Callable[[str], Path]) -> None:
    async with running(checkpoint_dir("llama")) as llm:
        events = Stream()
        for event in (Accepted(), Token(0, Choice(5)), Finished(0, True, Finish.STOP, 1, 0, None, 0.1, 0.1)):
            events.put(event)
        request: Any = SimpleNamespace(events=events)
        got = [response.WhichOneof("event") async for response in llm.service.servicer._responses(request, None)]
        assert got == ["admitted", "delta", "done"]


@pytest.mark.asyncio
async def test_requests_wait_for_a_reader_who_is_slow_and_not_for_one_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.llm.response_streams._QUEUED", 3)
    streams, response = ResponseStreams(), llm_pb2.GenerateResponse(delta=llm_pb2.Delta(token_ids=[1]))
    reader = streams.read("s")
    await anext(reader)
    for number in range(3):
        await streams.put(place(number), response)
    waiting = asyncio.create_task(streams.put(place(3), response))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert [r.number for r in (await anext(reader)).responses] == [0, 1, 2]
    await waiting
    assert [r.number for r in (await anext(reader)).responses] == [3]
    for number in range(3):
        await streams.put(place(number), response)
    waiting = asyncio.create_task(streams.put(place(3), response))
    await asyncio.sleep(0)
    await reader.aclose()
    await asyncio.wait_for(waiting, PATIENCE)
    with pytest.raises(Exception, match="no stream of this name is open"):
        await streams.put(place(4), response)
