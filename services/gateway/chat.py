"""The life of a request: probe, lay out, admit, encode, generate, stream. Whatever ends it early, everything is given back."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from services.common import logs
from services.common.errors import ServiceError, invalid, unavailable
from services.gateway.admission import Ledger, NeverFits, NoPool, QueueFull, Reservation
from services.gateway.answers import Answers, Delta, Ended
from services.gateway.backends import Backends
from services.gateway.background import Background
from services.gateway.config import GatewayConfig
from services.gateway.dispatch import Call, Dispatcher
from services.gateway.media import File, Probe
from services.gateway.model import ServedModel
from services.gateway.prompt import Prompt, PromptMaker
from services.gateway.validator import Conversation, Validator
from triptych.common.v1 import usage_pb2
from triptych.gateway.v1 import gateway_pb2

T = TypeVar("T")
logger = logging.getLogger(__name__)
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_RETRY_SECONDS = 1.0
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
    ) -> None:
        self._model, self._config, self._probe = model, config, probe
        self._backends, self._ledger = backends, ledger
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

    async def prompt(self, request: gateway_pb2.ChatRequest | gateway_pb2.EstimateTokensRequest) -> Prompt:
        """Validate, probe and lay out, on threads; long texts queue for one of their own, so that they hold up nobody else."""
        size = sum(len(part.text) for message in request.messages for part in message.parts)
        threads = self._long_text_thread if size > _LONG_TEXT else self._threads

        def read() -> tuple[Conversation, list[File]]:
            conversation = self._validator.read(request)
            return conversation, self._probe.files(conversation)

        conversation, files = await _on(threads, read)
        media = await self._probe.facts(files)
        return await _on(threads, lambda: self._prompts.make(conversation, media))

    def max_tokens(self, prompt: Prompt) -> int:
        """Longest answer: what the request says, else the default as far as there is room."""
        if prompt.sampling.max_tokens is not None:
            return prompt.sampling.max_tokens
        length = len(prompt.token_ids)
        largest_pool = max((pool.total * pool.block_size for pool in self._ledger.open_pools), default=self.max_model_len)
        room = min(self.max_model_len - length, (largest_pool - length) // prompt.sampling.n)
        return max(1, min(self._config.default_max_tokens, room), prompt.sampling.min_tokens)

    async def answer(self, request: gateway_pb2.ChatRequest, request_id: str, seconds: float) -> AsyncGenerator[Event, None]:
        """Answer within ``seconds``; closing the iterator ends the request everywhere."""
        started = time.monotonic()
        deadline = started + seconds
        async with asyncio.timeout(seconds):
            prompt = await self.prompt(request)
        max_tokens = self.max_tokens(prompt)
        self._check_length(prompt, max_tokens)
        probed = time.monotonic()
        call = Call(request_id, deadline, prompt, max_tokens, self._answers(prompt, max_tokens))
        self._dispatcher.check(call)
        ended: Ended | None = None
        with _refusals():
            tokens, prefer = self._tokens(prompt, max_tokens), self._dispatcher.preference(call)
            async with self._ledger.reserve(tokens, deadline - probed, prefer) as held:
                admitted = time.monotonic()
                _log_admitted(prompt, max_tokens, held)
                yield Admitted(request_id, prompt)
                before = usage_pb2.StageTimes(probe=probed - started, queue=admitted - probed)
                async with aclosing(self._dispatcher.answer(call, held)) as events:
                    async for event in events:
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

    def _tokens(self, prompt: Prompt, max_tokens: int) -> int:
        """Tokens that prompt and answers take in the end; the answers share the prompt's."""
        return len(prompt.token_ids) + prompt.sampling.n * max_tokens

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


@contextmanager
def _refusals() -> Iterator[None]:
    """The ledger's refusals, as errors that clients understand."""
    try:
        yield
    except NeverFits as error:
        text = f"prompt and answer need {error.requested} KV blocks, the limit is {error.limit}; send less or ask for less"
        raise invalid("messages", text, reason="KV_CAPACITY_EXCEEDED", limit=error.limit, requested=error.requested) from None
    except QueueFull:
        text = "too many requests are waiting already; try again later"
        raise ServiceError(_EXHAUSTED, text, reason="QUEUE_FULL", retry_delay=_RETRY_SECONDS) from None
    except NoPool:
        raise unavailable("no language model is answering; try again, or look at its logs") from None


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
