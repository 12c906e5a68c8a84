"""Translates ``LlmService`` messages to engine requests and back. Decides nothing else."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import torch

from services.common.channel import time_left
from services.common.errors import ServiceError, invalid
from services.llm.config import LlmConfig
from services.llm.embeddings import FetchTimes, RowFetcher, remote_items
from services.llm.engine import Engine, Request
from services.llm.events import (
    Aborted,
    Accepted,
    EngineFailure,
    Event,
    FetchFailed,
    Finished,
    PromptScores,
    Refused,
    Stream,
    Token,
)
from services.llm.logprobs import Choice
from services.llm.request import Limits, read_generate
from services.llm.response_streams import ResponseStreams
from services.llm.sequence import Finish
from services.llm.structured import Grammars
from services.models.checkpoint import Checkpoint
from services.models.wire import put_chunk
from triptych.common.v1 import usage_pb2
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

_STREAM_END_SECONDS = 1.0  # between an item's last row and the end of its stream
_FINISH = {Finish.STOP: usage_pb2.FINISH_REASON_STOP, Finish.LENGTH: usage_pb2.FINISH_REASON_LENGTH}


class LlmServicer(llm_pb2_grpc.LlmServiceServicer):
    """The gRPC face of an engine."""

    def __init__(
        self, engine: Engine, fetcher: RowFetcher, checkpoint: Checkpoint, grammars: Grammars, config: LlmConfig
    ) -> None:
        self.engine, self.fetcher, self.checkpoint, self.grammars, self.config = engine, fetcher, checkpoint, grammars, config
        runner, kv = engine.runner, engine.scheduler.kv
        self.limits = Limits(
            runner.vocab_size, runner.max_model_len, kv.pools[0].total * kv.block_size, runner.pruning, runner.pruning_obstacle,
            engine.scheduler.max_sequences,
        )  # fmt: skip
        self._active: dict[str, Request] = {}
        self._streams = ResponseStreams()

    async def Generate(
        self, request: llm_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[llm_pb2.GenerateResponse]:
        self._streams.check(request)
        async with aclosing(self._generate(request, context)) as responses:
            async for response in responses:
                if request.HasField("response_stream"):
                    await self._streams.put(request.response_stream, response)
                else:
                    yield response

    async def StreamResponses(
        self, request: llm_pb2.StreamResponsesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[llm_pb2.ResponseBatch]:
        async with aclosing(self._streams.read(request.stream_id)) as batches:
            async for batch in batches:
                yield batch

    async def _generate(
        self, request: llm_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        if len(self._active) >= self.config.max_requests:
            text = f"{len(self._active)} requests are running or waiting, as many as --max-requests allows; try again soon"
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, text, reason="TOO_MANY_REQUESTS", retry_delay=1.0)
        seed = self.config.seed or secrets.randbits(63)
        arguments = await read_generate(request, self.limits, self.checkpoint, self.grammars, seed)
        if request.request_id in self._active:
            raise ServiceError(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.request_id} is already running; use a new id"
            )
        self._active[request.request_id] = running = Request(arguments)
        fetching: asyncio.Task[FetchTimes] | None = None
        try:
            self.engine.submit(running)
            if request.spans:
                fetching = asyncio.create_task(self._fetch(request, running, time_left(context)))
                fetching.add_done_callback(partial(_tell_failure, running.events))
            async with aclosing(self._responses(running, fetching)) as responses:
                async for response in responses:
                    yield response
        finally:
            self.engine.abort(running)
            if fetching is not None:
                fetching.cancel()
            del self._active[request.request_id]

    async def Abort(self, request: llm_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> llm_pb2.AbortResponse:
        if running := self._active.get(request.request_id):
            self.engine.abort(running)
            running.events.put(Aborted())  # cancelling its task instead would leave the caller without a status
        return llm_pb2.AbortResponse()

    async def GetLoad(
        self, request: llm_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> llm_pb2.GetLoadResponse:
        engine, scheduler, runner, kv = self.engine, self.engine.scheduler, self.engine.runner, self.engine.scheduler.kv
        started = engine.step_started
        return llm_pb2.GetLoadResponse(
            running_sequences=len(scheduler.running),
            waiting_sequences=len(scheduler.waiting),
            total_blocks=kv.pools[0].total,
            free_blocks=kv.pools[0].available,
            block_size=kv.block_size,
            max_model_len=runner.max_model_len,
            max_num_batched_tokens=scheduler.token_budget,
            max_num_seqs=scheduler.max_sequences,
            tasks=len(asyncio.all_tasks()),
            steps=engine.steps,
            largest_batch=engine.largest_batch,
            model_fingerprint=self.checkpoint.fingerprint,
            parameter_bytes=runner.parameter_bytes,
            preemptions=scheduler.preemptions,
            cached_blocks=kv.pools[0].cached,
            prefix_query_tokens=kv.queries,
            prefix_hit_tokens=kv.hits,
            seconds_since_step=0.0 if started is None else time.monotonic() - started,
        )

    async def _fetch(self, request: llm_pb2.GenerateRequest, running: Request, timeout: float) -> FetchTimes:
        items = remote_items(request.spans, self.fetcher.features)

        def on_rows(span: int, feature: int, rows: torch.Tensor) -> None:
            self.engine.write_rows(running, span, feature, rows)

        def on_kept(span: int, kept: torch.Tensor) -> None:
            self.engine.keep_rows(running, span, kept)

        return await self.fetcher.fetch(request.request_id, items, on_rows, timeout, on_kept)

    async def _responses(
        self, request: Request, fetching: asyncio.Task[FetchTimes] | None
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        """Events as messages, until the last answer is complete."""
        while True:
            events = await request.events.take()
            if isinstance(events[0], Accepted):
                yield llm_pb2.GenerateResponse(admitted=llm_pb2.Admitted())
            for response in _pull(events):
                yield response
            for event in events:
                match event:
                    case Finished():
                        times = await _times(fetching, complete=event.wait_for_rows is not None)
                        yield llm_pb2.GenerateResponse(done=_done(event, times))
                        if event.last:
                            return
                    case FetchFailed():
                        raise event.error
                    case Aborted():
                        text = "the request was ended by an Abort call"
                        raise ServiceError(grpc.StatusCode.CANCELLED, text, reason="ABORTED")
                    case Refused():
                        raise invalid(event.field, str(event))
                    case EngineFailure():
                        raise ServiceError(grpc.StatusCode.INTERNAL, str(event))
            if request.events.lagged and request.events.caught_up:
                self.engine.resume(request)


async def _times(fetching: asyncio.Task[FetchTimes] | None, complete: bool) -> FetchTimes | None:
    """The fetch's times if its stream ends soon; one that breaks or hangs after its last row harms no finished answer.

    Where rows are missing (``complete`` is false) the prefix cache had what they stand for, and nobody waits for them.
    """
    if fetching is None:
        return None
    await asyncio.wait([fetching], timeout=_STREAM_END_SECONDS if complete else 0)
    return fetching.result() if fetching.done() and not fetching.cancelled() and not fetching.exception() else None


def _tell_failure(events: Stream, fetching: asyncio.Task[FetchTimes]) -> None:
    """Put the error of a fetch that went wrong among the request's events."""
    if fetching.cancelled():
        return
    error = fetching.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        text = "the request's deadline passed while it waited for embedding rows"
        error = ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, text)
    if error is not None:
        events.put(FetchFailed(error))


def _pull(events: Sequence[Event]) -> list[llm_pb2.GenerateResponse]:
    """Tokens as one delta per answer, in the order in which answers appear."""
    deltas: dict[int, llm_pb2.Delta] = {}
    scores: PromptScores | None = None
    for event in events:
        if isinstance(event, PromptScores):
            scores = event
        elif isinstance(event, Token):
            delta = deltas.setdefault(event.index, llm_pb2.Delta(index=event.index))
            delta.token_ids.append(event.choice.token)
            if event.choice.logprob is not None:
                delta.logprobs.append(_logprobs(event.choice))
            if event.logits is not None:
                delta.first_logits.data = put_chunk(delta.first_logits, event.logits, 0, 1).tobytes()
    if scores is not None and deltas:
        first = next(iter(deltas.values()))
        first.prompt_logprobs.CopyFrom(llm_pb2.PromptLogprobs(tokens=[_logprobs(choice) for choice in scores.choices]))
    return [llm_pb2.GenerateResponse(delta=delta) for delta in deltas.values()]


def _logprobs(choice: Choice) -> llm_pb2.TokenLogprobs:
    assert choice.logprob is not None and choice.rank is not None
    top = [llm_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in choice.top]
    return llm_pb2.TokenLogprobs(token_id=choice.token, logprob=choice.logprob, rank=choice.rank, top=top)


def _done(finished: Finished, fetched: FetchTimes | None) -> llm_pb2.Done:
    times = usage_pb2.StageTimes(prefill=finished.prefill, decode=finished.decode)
    if fetched is not None:
        times.preprocess, times.encode, times.transfer = fetched.preprocess, fetched.encode, fetched.transfer
    if finished.wait_for_rows is not None:
        times.wait_for_rows = finished.wait_for_rows
    return llm_pb2.Done(
        index=finished.index,
        last=finished.last,
        finish_reason=_FINISH[finished.reason],
        completion_tokens=finished.completion_tokens,
        cached_tokens=finished.cached_tokens,
        stage_times=times,
    )
