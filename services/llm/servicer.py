"""Translates ``LlmService`` messages to engine requests and back. Decides nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import torch

from services.common.channel import time_left
from services.common.errors import ServiceError, invalid
from services.llm.embeddings import FetchTimes, RemoteItem, RowFetcher
from services.llm.engine import Aborted, Engine, EngineFailure, Event, Finished, Request, Token
from services.llm.merge import MediaRun
from services.llm.sampler import Sampling
from services.llm.sequence import Finish, RowSpan
from services.llm.sequence import Sequence as LlmSequence
from services.models.checkpoint import Checkpoint
from services.models.media import Grid, Modality
from services.models.wire import to_chunk
from triptych.common.v1 import media_pb2, sampling_pb2, usage_pb2
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

_FINISH = {Finish.STOP: usage_pb2.FINISH_REASON_STOP, Finish.LENGTH: usage_pb2.FINISH_REASON_LENGTH}


class LlmServicer(llm_pb2_grpc.LlmServiceServicer):
    """The gRPC face of an engine."""

    def __init__(self, engine: Engine, fetcher: RowFetcher, checkpoint: Checkpoint, seed: int) -> None:
        self.engine, self.fetcher, self.checkpoint, self.seed = engine, fetcher, checkpoint, seed
        self._active: dict[str, Request] = {}

    async def Generate(
        self, request: llm_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[llm_pb2.GenerateResponse]:
        if request.request_id in self._active:
            raise ServiceError(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.request_id} is already running; use a new id"
            )
        engine_request = self._validated(request)
        self._active[request.request_id] = engine_request
        fetching: asyncio.Task[FetchTimes] | None = None
        try:
            self.engine.submit(engine_request)
            if request.spans:
                fetching = asyncio.create_task(self._fetch(request, engine_request, time_left(context)))
            yield llm_pb2.GenerateResponse(admitted=llm_pb2.Admitted())
            async with aclosing(self._events(engine_request, fetching)) as events:
                async for response in events:
                    yield response
        finally:
            self.engine.abort(engine_request)
            if fetching is not None:
                fetching.cancel()
            del self._active[request.request_id]

    async def Abort(self, request: llm_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> llm_pb2.AbortResponse:
        if running := self._active.get(request.request_id):
            self.engine.abort(running)
            running.events.put_nowait(Aborted())  # cancelling its task instead would leave the caller without a status
        return llm_pb2.AbortResponse()

    async def GetLoad(
        self, request: llm_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> llm_pb2.GetLoadResponse:
        scheduler, runner = self.engine.scheduler, self.engine.runner
        return llm_pb2.GetLoadResponse(
            running_sequences=len(scheduler.running),
            waiting_sequences=len(scheduler.waiting),
            total_blocks=scheduler.blocks.total,
            free_blocks=scheduler.blocks.free,
            block_size=scheduler.blocks.block_size,
            max_model_len=runner.max_model_len,
            max_num_batched_tokens=scheduler.token_budget,
            max_num_seqs=scheduler.max_sequences,
            tasks=len(asyncio.all_tasks()),
            steps=self.engine.steps,
            largest_batch=self.engine.largest_batch,
            model_fingerprint=self.checkpoint.fingerprint,
            parameter_bytes=runner.parameter_bytes,
            preemptions=scheduler.preemptions,
        )

    async def _fetch(self, request: llm_pb2.GenerateRequest, engine_request: Request, timeout: float) -> FetchTimes:
        items = [RemoteItem(i, s.ref.id, s.ref.encoder_address, s.rows) for i, s in enumerate(request.spans)]

        def on_rows(span: int, rows: torch.Tensor) -> None:
            self.engine.write_rows(engine_request, span, rows)

        return await self.fetcher.fetch(request.request_id, items, on_rows, timeout)

    async def _events(
        self, request: Request, fetching: asyncio.Task[FetchTimes] | None
    ) -> AsyncGenerator[llm_pb2.GenerateResponse, None]:
        """Engine events as messages; a failed fetch ends the stream with its error."""
        failure = asyncio.ensure_future(_first_error(fetching)) if fetching else None
        getting: asyncio.Future[Event] | None = None
        try:
            while True:
                getting = asyncio.ensure_future(request.events.get())
                await asyncio.wait([getting, failure] if failure else [getting], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    assert failure is not None
                    raise failure.result()
                events = [getting.result()]
                while not request.events.empty():
                    events.append(request.events.get_nowait())
                if tokens := [e for e in events if isinstance(e, Token)]:
                    yield llm_pb2.GenerateResponse(delta=_delta(tokens))
                for event in events:
                    match event:
                        case Finished():
                            yield llm_pb2.GenerateResponse(done=_done(event, await _times(fetching)))
                            return
                        case Aborted():
                            text = "the request was ended by an Abort call"
                            raise ServiceError(grpc.StatusCode.CANCELLED, text, reason="ABORTED")
                        case EngineFailure():
                            raise ServiceError(grpc.StatusCode.INTERNAL, str(event))
        finally:
            for waiting in (getting, failure):
                if waiting is not None:
                    waiting.cancel()

    def _validated(self, request: llm_pb2.GenerateRequest) -> Request:
        """The engine's request.

        Raises:
            ServiceError: INVALID_ARGUMENT naming the field and the limit.
        """
        runner = self.engine.runner
        prompt = list(request.token_ids)
        if not request.request_id or len(request.request_id) > 128:
            raise invalid("request_id", f"must have 1 to 128 characters, got {len(request.request_id)}")
        if not prompt:
            raise invalid("token_ids", "must not be empty")
        if max(prompt) >= runner.vocab_size:
            raise invalid("token_ids", f"must be below the vocabulary size {runner.vocab_size}, got {max(prompt)}")
        media = _media(request.spans, prompt, self.checkpoint)
        sampling = request.sampling
        room = runner.max_model_len - len(prompt)
        max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else max(1, room)
        if max_tokens < 1:
            raise invalid("sampling.max_tokens", "must be at least 1")
        blocks = self.engine.scheduler.blocks
        limit = min(runner.max_model_len, blocks.total * blocks.block_size)
        if len(prompt) + max_tokens > limit:
            raise invalid(
                "token_ids",
                f"prompt and answer may have {limit} tokens together; the prompt has {len(prompt)}, max_tokens is {max_tokens}",
                reason="CONTEXT_LENGTH_EXCEEDED", limit=limit, requested=len(prompt) + max_tokens,
            )  # fmt: skip
        if (last := max(sampling.stop_token_ids, default=0)) >= runner.vocab_size:
            raise invalid("sampling.stop_token_ids", f"must be below the vocabulary size {runner.vocab_size}, got {last}")
        ends = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(self.checkpoint.end_token_ids)
        )
        sequence = LlmSequence(
            request.request_id, prompt, max_tokens, ends, sampling.min_tokens, [RowSpan(run.offset, run.rows) for run in media]
        )
        return Request(sequence, media, _sampling(sampling, self.seed), sampling.include_first_logits)


async def _times(fetching: asyncio.Task[FetchTimes] | None) -> FetchTimes | None:
    """The fetch's times once its stream has ended; a stream that broke after its last row harms no finished answer."""
    if fetching is None:
        return None
    await asyncio.wait([fetching])
    return None if fetching.cancelled() or fetching.exception() else fetching.result()


async def _first_error(fetching: asyncio.Task[FetchTimes]) -> ServiceError:
    """Wait until the fetch fails, for ever if it does not."""
    await asyncio.wait([fetching])
    error = None if fetching.cancelled() else fetching.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, TimeoutError):
        return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited for embedding rows")
    if error is not None:
        raise error
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def _sampling(given: sampling_pb2.SamplingParams, seed: int) -> Sampling:
    if given.HasField("temperature") and not 0 <= given.temperature <= 2:
        raise invalid("sampling.temperature", f"must be between 0 and 2, got {given.temperature:g}")
    if given.HasField("top_p") and not 0 < given.top_p <= 1:
        raise invalid("sampling.top_p", f"must be above 0 and at most 1, got {given.top_p:g}")
    if given.HasField("min_p") and not 0 <= given.min_p <= 1:
        raise invalid("sampling.min_p", f"must be between 0 and 1, got {given.min_p:g}")
    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=(given.seed if given.HasField("seed") else seed) % 2**63,
    )


def _media(spans: Sequence[media_pb2.Span], prompt: list[int], checkpoint: Checkpoint) -> list[MediaRun]:
    """The spans, checked against the prompt: known modality, sorted, disjoint, inside, over placeholders only and over all."""
    runs: list[MediaRun] = []
    end = 0
    covered = 0
    placeholders = {checkpoint.placeholder_id(m): m for m in checkpoint.family.modalities}
    for i, span in enumerate(spans):
        if int(span.modality) not in set(checkpoint.family.modalities):
            raise invalid(f"spans[{i}].modality", f"a {checkpoint.family.model_type} model does not take this modality")
        modality = Modality(span.modality)
        if span.offset < end or span.rows < 1 or span.offset + span.rows > len(prompt):
            raise invalid(
                f"spans[{i}]", f"must start at {end} or later, have a row and end inside the prompt of {len(prompt)} tokens"
            )
        end = span.offset + span.rows
        token = checkpoint.placeholder_id(modality)
        if any(t != token for t in prompt[span.offset : end]):
            raise invalid(f"spans[{i}]", f"must stand over placeholder tokens {token} only")
        if checkpoint.family.positions_from_grid:
            _check_grid(f"spans[{i}].grid", span, int(checkpoint.config["vision_config"].get("spatial_merge_size", 2)))
        if not span.ref.id or not span.ref.encoder_address:
            raise invalid(f"spans[{i}].ref", "must name a ref and its encoder")
        covered += span.rows
        runs.append(MediaRun(modality, span.offset, span.rows, Grid(span.grid.t, span.grid.h, span.grid.w)))
    stray = sum(t in placeholders for t in prompt) - covered
    if stray:
        raise invalid("spans", f"{stray} placeholder tokens of the prompt belong to no span")
    return runs


def _check_grid(field: str, span: media_pb2.Span, merge: int) -> None:
    """The grid says as many rows as the span has: positions are made from it, as many as it says."""
    t, h, w = span.grid.t, span.grid.h, span.grid.w
    if h % merge or w % merge or t * h * w != span.rows * merge**2:
        raise invalid(field, f"{t} x {h} x {w} patches, merged {merge} x {merge}, must give the span's {span.rows} rows")


def _delta(tokens: list[Token]) -> llm_pb2.Delta:
    logits = tokens[0].logits
    delta = llm_pb2.Delta(token_ids=[t.id for t in tokens])
    if logits is not None:
        delta.first_logits.CopyFrom(to_chunk(logits, 0, 1))
    return delta


def _done(finished: Finished, fetched: FetchTimes | None) -> llm_pb2.Done:
    times = usage_pb2.StageTimes(prefill=finished.prefill, decode=finished.decode)
    if fetched is not None:
        times.preprocess, times.encode, times.transfer = fetched.preprocess, fetched.encode, fetched.transfer
    if finished.wait_for_rows is not None:
        times.wait_for_rows = finished.wait_for_rows
    return llm_pb2.Done(finish_reason=_FINISH[finished.reason], completion_tokens=finished.completion_tokens, stage_times=times)
