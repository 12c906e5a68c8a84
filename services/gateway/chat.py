"""The life of a request: probe, lay out, admit, encode, generate, stream. Whatever ends it early, everything is given back."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from services.common import logs
from services.common.errors import ServiceError, invalid
from services.gateway.admission import Ask, Ledger, Reservation
from services.gateway.backends import Backends
from services.gateway.background import Background
from services.gateway.config import GatewayConfig
from services.gateway.cost import Class, Cost, kind_of
from services.gateway.detokenizer import Detokenizer
from services.gateway.known_items import KnownItems
from services.gateway.media import File, Probe
from services.gateway.model import ServedModel
from services.gateway.prompt import Prompt, PromptMaker
from services.gateway.refusals import refusals
from services.gateway.tenants import Tenants
from services.gateway.uploads import Uploads
from services.gateway.validator import Conversation, Validator
from services.models.media import Modality
from triptych.common.v1 import media_pb2, tensor_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2
from triptych.llm.v1 import llm_pb2

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
class Delta:
    """More of the answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    first_logits: tensor_pb2.TensorChunk | None = None


@dataclass(frozen=True)
class Done:
    """The answer is complete."""

    prompt: Prompt
    finish_reason: usage_pb2.FinishReason.ValueType
    completion_tokens: int
    cached_tokens: int
    stage_times: usage_pb2.StageTimes


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
        self._backends, self._ledger, self._background = backends, ledger, background
        self._tenants, self._known = tenants, KnownItems()
        self._validator, self._prompts = Validator(model, config), PromptMaker(model, config)
        self._threads = ThreadPoolExecutor(_PROBE_THREADS, "probe")
        self._long_text_thread = ThreadPoolExecutor(1, "probe-long")
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
        tenant = self._tenants.signed_in()
        size = sum(len(part.text) for message in request.messages for part in message.parts)
        threads = self._long_text_thread if size > _LONG_TEXT else self._threads

        def read() -> tuple[Conversation, list[File]]:
            conversation = self._validator.read(request)
            conversation = replace(conversation, cache_salt=self._tenants.salt(tenant, conversation.cache_salt))
            return conversation, self._probe.files(conversation)

        conversation, files = await _on(threads, read)
        media = await self._probe.facts(files)
        return await _on(threads, lambda: self._prompts.make(conversation, media))

    def max_tokens(self, prompt: Prompt) -> int:
        """Longest answer: what the request says, else the default as far as there is room."""
        if prompt.sampling.max_tokens is not None:
            return prompt.sampling.max_tokens
        largest_pool = max((pool.total * pool.block_size for pool in self._ledger.open_pools), default=self.max_model_len)
        room = min(self.max_model_len, largest_pool) - len(prompt.token_ids)
        return max(1, min(self._config.default_max_tokens, room), prompt.sampling.min_tokens)

    def ask(self, prompt: Prompt) -> Ask:
        """What a prompt asks the ledger for."""
        new = self._known.new(prompt.items)
        cost = Cost(
            prompt_tokens=len(prompt.token_ids),
            answer_tokens=self.max_tokens(prompt),
            encoder_patches=sum(item.plan.patches for item in new),
            encoder_items=len(new),
            media_bytes=prompt.media_bytes,
        )
        kind = kind_of(len(prompt.token_ids), {item.plan.modality for item in prompt.items})
        return Ask(cost, kind, self._tenants.signed_in(), prompt.sampling.priority)

    def expected_wait(self, prompt: Prompt) -> float:
        """Seconds that it would wait for admission if it came now."""
        return self._ledger.expected_wait(self.ask(prompt))

    async def answer(self, request: gateway_pb2.ChatRequest, request_id: str, seconds: float) -> AsyncGenerator[Event, None]:
        """Answer within ``seconds``; closing the iterator ends the request everywhere."""
        started = time.monotonic()
        deadline = started + seconds
        with refusals(), self._ledger.arriving(self._tenants.signed_in(), _guessed_kind(request), seconds):
            async with asyncio.timeout(seconds):
                prompt = await self.prompt(request)
        max_tokens = self.max_tokens(prompt)
        self._check_length(prompt, max_tokens)
        probed = time.monotonic()
        with refusals():
            async with self._ledger.reserve(self.ask(prompt), deadline - probed) as reservation:
                admitted = time.monotonic()
                _log_admitted(prompt, max_tokens, reservation)
                yield Admitted(request_id, prompt)
                call = _Call(request_id, deadline, prompt, max_tokens)
                async with self._encoded(call) as refs, aclosing(self._generate(call, reservation.pool.name, refs)) as deltas:
                    async for delta in deltas:
                        if not reservation.completion_tokens:
                            self._ledger.flowed(reservation)
                        reservation.completion_tokens = call.completion_tokens
                        yield delta
        self.finished += 1
        call.times.MergeFrom(usage_pb2.StageTimes(probe=probed - started, queue=admitted - probed))
        yield Done(prompt, call.finish_reason, call.completion_tokens, call.cached_tokens, call.times)

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

    @asynccontextmanager
    async def _encoded(self, call: _Call) -> AsyncIterator[list[media_pb2.EmbeddingRef]]:
        """Hold refs to the rows of every item; giving them back goes on behind the request."""
        items = call.prompt.items
        if not items:
            yield []
            return
        self._known.add(items)
        uploads = Uploads(self._backends.choose_encoder(), call.prompt.items, call.request_id, call.seconds_left)
        try:
            yield await uploads.refs()
        except BaseException:
            self._known.forget(items)
            raise
        finally:
            self._background.start(uploads.drop())

    async def _generate(self, call: _Call, llm: str, refs: list[media_pb2.EmbeddingRef]) -> AsyncGenerator[Delta, None]:
        """Stream the language model's tokens as text, up to a stop string."""
        sampling, end = call.prompt.sampling, self._model.checkpoint.end_token_ids
        text = Detokenizer(
            self._model.tokenizer,
            stop=sampling.stop,
            end_token_ids=(*sampling.stop_token_ids, *(() if sampling.ignore_eos else end)),
            min_tokens=sampling.min_tokens,
        )
        stream = self._backends.llms[llm].generate(call.prompt, call.max_tokens, refs, call.request_id, call.seconds_left)
        async with aclosing(stream) as responses:
            async for response in responses:
                if response.HasField("admitted"):
                    call.cached_tokens = response.admitted.cached_tokens
                elif response.HasField("delta"):
                    yield call.take(text, response.delta)
                elif response.HasField("done"):
                    call.finish(response.done)
                    if rest := text.finish(ended_by_token=call.finish_reason == usage_pb2.FINISH_REASON_STOP):
                        yield Delta(rest)
                if text.stopped:
                    call.finish_reason = usage_pb2.FINISH_REASON_STOP
                if call.finish_reason:
                    return
        raise ServiceError(grpc.StatusCode.INTERNAL, "the language model ended its answer too early; its log has the details")


@dataclass
class _Call:
    """One request on its way through the backends, and what they told so far."""

    request_id: str
    deadline: float
    prompt: Prompt
    max_tokens: int
    finish_reason: usage_pb2.FinishReason.ValueType = usage_pb2.FINISH_REASON_UNSPECIFIED
    completion_tokens: int = 0
    cached_tokens: int = 0
    times: usage_pb2.StageTimes = field(default_factory=usage_pb2.StageTimes)
    first_delta: float = 0.0

    @property
    def seconds_left(self) -> float:
        """What the next hop may take."""
        return max(0.0, self.deadline - time.monotonic())

    def take(self, text: Detokenizer, delta: llm_pb2.Delta) -> Delta:
        """Add tokens to the text, until a stop string is complete."""
        self.first_delta = self.first_delta or time.monotonic()
        shown, taken = "", []
        for token in delta.token_ids:
            shown += text.push(token)
            taken.append(token)
            if text.stopped:
                self.times.decode = time.monotonic() - self.first_delta  # the language model, cut off, will not say
                break
        self.completion_tokens = text.tokens
        return Delta(shown, tuple(taken), delta.first_logits if delta.HasField("first_logits") else None)

    def finish(self, done: llm_pb2.Done) -> None:
        """The language model's own end."""
        self.finish_reason, self.cached_tokens = done.finish_reason, done.cached_tokens
        self.times.MergeFrom(done.stage_times)


async def _on(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run it on one of the threads, as part of the request."""
    return await asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, work)


def _guessed_kind(request: gateway_pb2.ChatRequest) -> Class:
    """The class of a request that nobody has looked at yet."""
    parts = [part for message in request.messages for part in message.parts]
    modalities = {_MODALITIES[content] for part in parts if (content := part.WhichOneof("content")) not in (None, "text")}
    return kind_of(sum(len(part.text) for part in parts) // _CHARACTERS, modalities)


def _log_admitted(prompt: Prompt, max_tokens: int, reservation: Reservation) -> None:
    media = [item.digest.hex()[:16] for item in prompt.items]
    logs.event(
        logger, "admitted", prompt_tokens=len(prompt.token_ids), max_tokens=max_tokens, kv_blocks=reservation.blocks, media=media
    )
