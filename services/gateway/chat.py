"""The life of a request: probe, lay out, admit, encode, generate, stream. Whatever ends it early, everything is given back."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from services.common import logs
from services.common.errors import invalid
from services.gateway.admission import Ask, Ledger, Reservation
from services.gateway.answers import Answers, Delta, Ended
from services.gateway.backends import Backends
from services.gateway.background import Background
from services.gateway.budgets import Prefer
from services.gateway.config import GatewayConfig
from services.gateway.cost import Class, Cost, kind_of
from services.gateway.dispatch import Call, Dispatcher
from services.gateway.known_items import KnownItems
from services.gateway.media import Probe
from services.gateway.model import ServedModel
from services.gateway.prompt import Prompt, PromptMaker
from services.gateway.refusals import refusals
from services.gateway.tenants import Tenant, Tenants
from services.gateway.validator import Conversation, Validator
from services.models.media import Modality
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2

T = TypeVar("T")
logger = logging.getLogger(__name__)
_MODALITIES = {modality.word: modality for modality in Modality}
_CHARACTERS = 4  # of a token, about
_PROBE_THREADS = 4
_LONG_TEXT = 64 * 1024  # characters; tokenising that many takes about 20 ms
_UNKNOWN_BLOCK_SIZE = 16  # until a language model has published its own


@dataclass(frozen=True)
class Admitted:
    """The request was let in."""

    request_id: str
    prompt: Prompt


@dataclass(frozen=True)
class Done:
    """Answer ``index`` is complete; where it is the last, ``completion_tokens`` are those of all."""

    prompt: Prompt
    finish_reason: usage_pb2.FinishReason.ValueType
    completion_tokens: int
    cached_tokens: int
    stage_times: usage_pb2.StageTimes
    index: int = 0
    last: bool = True


Event = Admitted | Delta | Done


class Chat:
    """Answers requests."""

    def __init__(
        self,
        model: ServedModel,
        config: GatewayConfig,
        probe: Probe,
        backends: Backends,
        ledger: Ledger,
        background: Background,
        tenants: Tenants,
    ) -> None:
        self._model, self._config, self._probe = model, config, probe
        self._backends, self._ledger = backends, ledger
        self._tenants, self._known = tenants, KnownItems()
        self._validator, self._prompts = Validator(model, config), PromptMaker(model, config)
        self._threads = ThreadPoolExecutor(_PROBE_THREADS, "probe")
        self._long_text_thread = ThreadPoolExecutor(1, "probe-long")
        self._dispatcher = Dispatcher(backends, ledger, background)
        self.finished = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together: the least of what was configured and what the language models take."""
        published = [llm.load.max_model_len for llm in self._backends.llms.values() if llm.ready and llm.load.max_model_len]
        return min([self._model.max_model_len, *published])

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return min((pool.block_size for pool in self._ledger.open_pools), default=_UNKNOWN_BLOCK_SIZE)

    async def prompt(self, request: gateway_pb2.ChatRequest | gateway_pb2.EstimateTokensRequest, seconds: float) -> Prompt:
        """Validate, probe and lay out within ``seconds``, where there is room for one more that is looked at."""
        tenant = self._tenants.signed_in()
        with refusals(), self._ledger.arriving(tenant, _guessed_kind(request), seconds):
            async with asyncio.timeout(seconds):
                return await self._look(request, tenant)

    async def _look(self, request: gateway_pb2.ChatRequest | gateway_pb2.EstimateTokensRequest, tenant: Tenant) -> Prompt:
        """On threads; long texts queue for one of their own, so that they hold up nobody else."""
        size = sum(len(part.text) for message in request.messages for part in message.parts)
        threads = self._long_text_thread if size > _LONG_TEXT else self._threads

        def read() -> Conversation:
            conversation = self._validator.read(request)
            return replace(conversation, cache_salt=self._tenants.salt(tenant, conversation.cache_salt))

        conversation, fetch_seconds = await self._probe.fetcher.fetched(await _on(threads, read))
        files = await _on(threads, lambda: self._probe.files(conversation))
        media = await self._probe.facts(files)
        prompt = await _on(threads, lambda: self._prompts.make(conversation, media))
        return replace(prompt, fetch_seconds=fetch_seconds) if fetch_seconds else prompt

    def check(self, request: gateway_pb2.ChatRequest) -> None:
        """Raise what is wrong with a request's form; no medium is looked at."""
        self._validator.read(request)

    def max_tokens(self, prompt: Prompt) -> int:
        """Longest answer: what the request says, else the default as far as there is room."""
        if prompt.sampling.max_tokens is not None:
            return prompt.sampling.max_tokens
        length = len(prompt.token_ids)
        largest_pool = max((pool.total * pool.block_size for pool in self._ledger.open_pools), default=self.max_model_len)
        room = min(self.max_model_len - length, (largest_pool - length) // prompt.sampling.n)
        return max(1, min(self._config.default_max_tokens, room), prompt.sampling.min_tokens)

    def ask(self, prompt: Prompt, prefer: Prefer | None = None) -> Ask:
        """What a prompt asks the ledger for; ``prefer`` as :class:`Ask` has it."""
        new = self._known.new(prompt.items)
        cost = Cost(
            prompt_tokens=len(prompt.token_ids),
            answer_tokens=self.max_tokens(prompt),
            answers=prompt.sampling.n,
            cached_tokens=self._backends.cached_tokens(prompt),
            encoder_patches=sum(item.plan.patches for item in new),
            encoder_items=len(new),
            media_bytes=prompt.media_bytes,
        )
        kind = kind_of(len(prompt.token_ids), {item.plan.modality for item in prompt.items})
        return Ask(cost, kind, self._tenants.signed_in(), prompt.sampling.priority, prefer)

    def best_llm(self, prompt: Prompt) -> str:
        """Where a prompt goes if there is room: a language model's address, or nothing where none is ready."""
        return next(iter(self._backends.llms_for(prompt)), "")

    async def answer(self, request: gateway_pb2.ChatRequest, request_id: str, seconds: float) -> AsyncGenerator[Event, None]:
        """Answer within ``seconds``; closing the iterator ends the request everywhere."""
        started = time.monotonic()
        deadline = started + seconds
        prompt = await self.prompt(request, seconds)
        max_tokens = self.max_tokens(prompt)
        self._check_length(prompt, max_tokens)
        probed = time.monotonic()
        call = Call(request_id, deadline, prompt, max_tokens, self._answers(prompt, max_tokens))
        self._dispatcher.check(call)
        ended: Ended | None = None
        with refusals():
            ask = self.ask(prompt, self._dispatcher.preference(call))
            async with self._ledger.reserve(ask, deadline - probed) as held:
                admitted = time.monotonic()
                _log_admitted(prompt, max_tokens, held)
                yield Admitted(request_id, prompt)
                before = usage_pb2.StageTimes(
                    probe=probed - started - prompt.fetch_seconds, queue=admitted - probed, fetch=prompt.fetch_seconds or None
                )
                with self._known.handed_over(prompt.items):
                    async with aclosing(self._dispatcher.answer(call, held)) as events:
                        async for event in events:
                            if not held.completion_tokens:
                                self._ledger.flowed(held)
                            held.completion_tokens = call.answers.completion_tokens
                            if isinstance(event, Delta):
                                yield event
                            elif call.answers.over:
                                ended = event
                            else:
                                yield _done(call, event, before)
        assert ended is not None, "answers end one by one"
        self.finished += 1
        yield _done(call, ended, before)

    def _answers(self, prompt: Prompt, max_tokens: int) -> Answers:
        return Answers(self._model.tokenizer, prompt.sampling, self._model.checkpoint.end_token_ids, max_tokens)

    def _check_length(self, prompt: Prompt, max_tokens: int) -> None:
        limit, length = self.max_model_len, len(prompt.token_ids)
        if length + 1 > limit:
            text = f"the prompt has {length} tokens, the limit is {limit} with the answer; send less text or smaller media"
            raise invalid("messages", text, reason="CONTEXT_LENGTH_EXCEEDED", limit=limit, requested=length + 1)
        if (total := length + max_tokens) > limit:
            field = "sampling.min_tokens" if prompt.sampling.max_tokens is None else "sampling.max_tokens"
            text = (
                f"{length} tokens of prompt and {max_tokens} of answer exceed the limit {limit}; ask for at most {limit - length}"
            )
            raise invalid(field, text, reason="CONTEXT_LENGTH_EXCEEDED", limit=limit, requested=total)


async def _on(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run it on one of the threads, as part of the request."""
    return await asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, work)


def _guessed_kind(request: gateway_pb2.ChatRequest | gateway_pb2.EstimateTokensRequest) -> Class:
    """The class of a request that nobody has looked at yet."""
    parts = [part for message in request.messages for part in message.parts]
    modalities = {_MODALITIES[content] for part in parts if (content := part.WhichOneof("content")) not in (None, "text")}
    return kind_of(sum(len(part.text) for part in parts) // _CHARACTERS, modalities)


def _log_admitted(prompt: Prompt, max_tokens: int, reservation: Reservation) -> None:
    media = [item.digest.hex()[:16] for item in prompt.items]
    logs.event(
        logger, "admitted", prompt_tokens=len(prompt.token_ids), max_tokens=max_tokens, kv_blocks=reservation.blocks, media=media
    )


def _done(call: Call, ended: Ended, before: usage_pb2.StageTimes) -> Done:
    """The end of an answer; ``before`` says where the time went before the backends."""
    last = call.answers.over
    tokens = call.answers.completion_tokens if last else ended.completion_tokens
    times = usage_pb2.StageTimes()
    times.MergeFrom(ended.stage_times)
    times.MergeFrom(before)
    return Done(call.prompt, ended.finish_reason, tokens, call.answers.cached_tokens, times, ended.index, last)
