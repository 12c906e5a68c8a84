"""``ChatService``: protobuf in, protobuf out; everything else is :class:`services.gateway.chat.Chat`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import grpc

from services.common import logs
from services.common.channel import time_left
from services.common.interceptor import REQUEST_ID_HEADER
from services.gateway.admission import Ledger
from services.gateway.answers import Delta
from services.gateway.chat import Admitted, Chat, Done, Event
from services.gateway.model import ServedModel
from services.gateway.pages import Answer, Pages, opening, read_start
from services.gateway.prompt import Item, Prompt
from services.gateway.tenants import Tenants, credentials
from services.gateway.token_text import TokenTexts
from services.gateway.wire import grid_to_proto, modality_to_proto
from services.models.media import Modality, Recording
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from triptych.llm.v1 import llm_pb2

Context = grpc.aio.ServicerContext[Any, Any]


class ChatServicer(gateway_pb2_grpc.ChatServiceServicer):
    """Translates."""

    def __init__(self, model: ServedModel, chat: Chat, ledger: Ledger, tenants: Tenants) -> None:
        self._model, self._chat, self._ledger, self._tenants = model, chat, ledger, tenants
        self._texts = TokenTexts(model.tokenizer)

    async def Chat(self, request: gateway_pb2.ChatRequest, context: Context) -> AsyncIterator[gateway_pb2.ChatResponse]:
        _present(context)
        async with aclosing(self._chat.answer(request, logs.request_id.get(), time_left(context))) as events:
            async for event in events:
                yield self.response(event)

    async def EstimateTokens(
        self, request: gateway_pb2.EstimateTokensRequest | gateway_pb2.ChatRequest, context: Context
    ) -> gateway_pb2.EstimateTokensResponse:
        _present(context)
        prompt = await self._chat.prompt(request, time_left(context))
        ask = self._chat.ask(prompt)
        tokens, cost = len(prompt.token_ids), ask.cost
        return gateway_pb2.EstimateTokensResponse(
            prompt_tokens=tokens,
            prompt_tokens_details=_prompt_tokens(prompt),
            media=[_estimate(item) for item in prompt.items],
            cost=gateway_pb2.Cost(
                encoder_patches=cost.encoder_patches,
                prefill_tokens=cost.prefill_tokens(self._chat.best_llm(prompt)),
                kv_blocks=cost.blocks(self._chat.block_size),
                host_bytes=cost.media_bytes,
            ),
            max_model_len=self._chat.max_model_len,
            expected_wait_seconds=self._ledger.expected_wait(ask),
        )

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> gateway_pb2.ListModelsResponse:
        _present(context)
        self._tenants.signed_in()
        model = gateway_pb2.Model(
            name=self._model.name,
            family=self._model.family,
            max_model_len=self._chat.max_model_len,
            modalities=[modality_to_proto(modality) for modality in self._model.modalities],
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def ChatPages(
        self, request_iterator: AsyncIterator[gateway_pb2.ChatPagesRequest], context: Context
    ) -> AsyncIterator[gateway_pb2.ChatPagesResponse]:
        _present(context)
        self._tenants.signed_in()
        start = await read_start(request_iterator)
        self._chat.check(opening(start))
        request_id = logs.request_id.get()
        await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))  # says that the start was taken
        chat = cast(Answer, partial(self.Chat, context=context))
        async with aclosing(Pages(start, request_iterator, chat, request_id).answers()) as responses:
            async for response in responses:
                yield response

    async def GetLoad(self, request: gateway_pb2.GetLoadRequest, context: Context) -> gateway_pb2.GetLoadResponse:
        _present(context)
        self._tenants.signed_in()
        return gateway_pb2.GetLoadResponse(
            running_requests=self._ledger.running,
            queued_requests=self._ledger.queued,
            reserved_kv_blocks=self._ledger.reserved_blocks,
            total_kv_blocks=sum(pool.total for pool in self._ledger.open_pools),
            tasks=len(asyncio.all_tasks()),
            finished_requests=self._chat.finished,
            reserved=_budgets(self._ledger.reserved),
            budget=_budgets(self._ledger.limit),
            refused_requests=self._ledger.refused,
        )

    def response(self, event: Event) -> gateway_pb2.ChatResponse:
        """An event of an answer as every door shows it."""
        match event:
            case Admitted(request_id, prompt):
                admitted = gateway_pb2.Admitted(
                    request_id=request_id,
                    model=self._model.name,
                    prompt_tokens=_prompt_tokens(prompt),
                    media=[_estimate(item) for item in prompt.items],
                )
                return gateway_pb2.ChatResponse(admitted=admitted)
            case Delta(text, token_ids, logits, index, logprobs):
                told = [self._logprob(token) for token in logprobs]
                delta = gateway_pb2.Delta(text=text, token_ids=token_ids, first_logits=logits, index=index, logprobs=told)
                return gateway_pb2.ChatResponse(delta=delta)
            case Done():
                return gateway_pb2.ChatResponse(done=_done(event))

    def _logprob(self, given: llm_pb2.TokenLogprobs) -> gateway_pb2.TokenLogprob:
        told = self._token(given.token_id, given.logprob)
        told.top.extend(self._token(top.token_id, top.logprob) for top in given.top)
        return told

    def _token(self, token: int, logprob: float) -> gateway_pb2.TokenLogprob:
        text, data = self._texts[token]
        return gateway_pb2.TokenLogprob(token_id=token, token=text, bytes=data, logprob=logprob)


def _present(context: Context) -> None:
    """Say what the caller presented of itself; whoever does the work asks who that is."""
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    credentials.set(given if isinstance(given, str) else "")


def _budgets(figures: Mapping[str, int]) -> gateway_pb2.Cost:
    return gateway_pb2.Cost(**{budget.name: figures.get(budget.name, 0) for budget in gateway_pb2.Cost.DESCRIPTOR.fields})


def _done(event: Done) -> gateway_pb2.Done:
    tokens = len(event.prompt.token_ids)
    usage = usage_pb2.Usage(
        prompt_tokens=tokens,
        completion_tokens=event.completion_tokens,
        total_tokens=tokens + event.completion_tokens,
        prompt_tokens_details=_prompt_tokens(event.prompt, event.cached_tokens),
    )
    return gateway_pb2.Done(
        finish_reason=event.finish_reason, usage=usage, stage_times=event.stage_times, index=event.index, last=event.last
    )


def _prompt_tokens(prompt: Prompt, cached: int = 0) -> usage_pb2.PromptTokens:
    return usage_pb2.PromptTokens(
        text=prompt.text_tokens,
        image=prompt.tokens_of(Modality.IMAGE),
        audio=prompt.tokens_of(Modality.AUDIO),
        video=prompt.tokens_of(Modality.VIDEO),
        cached=cached,
    )


def _estimate(item: Item) -> gateway_pb2.MediaEstimate:
    return gateway_pb2.MediaEstimate(
        modality=modality_to_proto(item.plan.modality),
        tokens=item.tokens,
        width=None if isinstance(item.medium, Recording) else item.medium.width,
        height=None if isinstance(item.medium, Recording) else item.medium.height,
        grid=grid_to_proto(item.plan.grid),
        field=item.field,
    )
