"""The life of a request, with a fake encoder and a fake language model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import Script, Stack, ask, part, picture, refused, stack, until, user
from tokenizers import Tokenizer

from services.common.errors import ServiceError, invalid
from services.gateway.media import Probed
from services.gateway.prompt import Prompt, PromptMaker
from services.gateway.validator import Conversation
from services.models.checkpoint import open_checkpoint
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2, sampling_pb2, usage_pb2
from triptych.gateway.v1 import gateway_pb2

Directory = Callable[[str], Path]
STOP, LENGTH = usage_pb2.FINISH_REASON_STOP, usage_pb2.FINISH_REASON_LENGTH
INVALID, CODE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode


@pytest.fixture
def qwen(checkpoint_dir: Directory) -> Path:
    return checkpoint_dir("qwen2_vl")


def encode(checkpoint: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids)


async def answer(stack: Stack, request: gateway_pb2.ChatRequest, **options: Any) -> list[gateway_pb2.ChatResponse]:
    return [event async for event in stack.stub.Chat(request, **options)]


async def last(call: Any) -> bool:
    """Whether a call that was read from ends well."""
    while (event := await call.read()) is not grpc.aio.EOF:
        final = event
    return bool(final.HasField("done"))


def text_of(events: list[gateway_pb2.ChatResponse]) -> str:
    return "".join(event.delta.text for event in events)


def tokens_of(events: list[gateway_pb2.ChatResponse]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


@pytest.mark.asyncio
async def test_an_answer_about_a_picture(qwen: Path) -> None:
    async with stack(qwen) as s:
        ids, end = encode(qwen, "Größe 👩‍👩‍👧 ok"), open_checkpoint(str(qwen)).end_token_ids[0]
        s.llm.script = Script([[token] for token in [*ids, end]], STOP)
        events = await answer(s, ask("What", picture(280, 140), "is it?"), metadata=(("x-request-id", "abc"),))
        admitted, done = events[0].admitted, events[-1].done
        assert (admitted.request_id, admitted.model) == ("abc", "qwen2_vl")
        [item] = admitted.media
        assert (item.tokens, item.width, item.height, item.field) == (50, 280, 140, "messages[0].parts[1].image")
        assert item.grid == media_pb2.Grid(t=1, h=10, w=20) and item.modality == media_pb2.MODALITY_IMAGE
        assert text_of(events) == "Größe 👩‍👩‍👧 ok" and tokens_of(events) == [*ids, end]
        assert not any("\ufffd" in event.delta.text for event in events)
        usage, times = done.usage, done.stage_times
        assert done.finish_reason == STOP
        assert usage.completion_tokens == len(ids) + 1 and usage.total_tokens == usage.prompt_tokens + len(ids) + 1
        details = usage.prompt_tokens_details
        assert (details.image, details.cached, details.text + details.image) == (50, 3, usage.prompt_tokens)
        assert (times.encode, times.prefill, times.decode) == (0.5, 0.25, 0.125) and times.probe > 0 and times.HasField("queue")
        await s.idle()
        assert (await s.load()).finished_requests == 1


@pytest.mark.asyncio
async def test_what_the_backends_are_told(qwen: Path) -> None:
    async with stack(qwen) as s:
        pictures = [picture(56, 56), picture(84, 56), picture(56, 84)]
        messages = [
            user("a", pictures[0], pictures[1], "b"),
            gateway_pb2.Message(role=3, parts=[part("c")]),
            user(pictures[2], "d"),
        ]
        sampling = sampling_pb2.SamplingParams(temperature=0.5, seed=7, max_tokens=9, stop=["never"], stop_token_ids=[5])
        request = gateway_pb2.ChatRequest(messages=messages, sampling=sampling, cache_salt="tenant")
        await answer(s, request, metadata=(("x-request-id", "abc"),), timeout=20)
        [sent] = s.llm.requests
        assert sent.request_id == "abc" == s.llm.metadata["x-request-id"] == s.encoder.metadata["x-request-id"]
        assert 15 < s.encoder.time_left < 21 and 15 < s.llm.time_left < 21  # gRPC rounds timeouts up
        assert list(sent.token_ids) and sent.sampling.max_tokens == 9 and sent.sampling.seed == 7 and not sent.sampling.stop
        assert sent.sampling.temperature == 0.5 and sent.sampling.top_p == 1 and list(sent.sampling.stop_token_ids) == [5]
        placeholder = sent.token_ids[sent.spans[0].offset]
        assert [span.rows for span in sent.spans] == [4, 6, 6]
        assert [(span.grid.h, span.grid.w) for span in sent.spans] == [(4, 4), (4, 6), (6, 4)]
        for span in sent.spans:
            assert set(sent.token_ids[span.offset : span.offset + span.rows]) == {placeholder} and len(span.digest) == 32
        assert [span.offset for span in sent.spans] == sorted(span.offset for span in sent.spans)
        assert sent.cache_salt == "tenant" and {item.cache_salt for item in s.encoder.items} == {"tenant"}
        by_ref = {f"ref{i + 1}": item for i, item in enumerate(s.encoder.items)}
        for span, data in zip(sent.spans, pictures, strict=True):
            item = by_ref[span.ref.id]
            assert item.data == data and span.ref.encoder_address == s.encoder_address
            assert (item.expected_rows, item.expected_grid, item.modality) == (span.rows, span.grid, span.modality)
        assert {item.field for item in s.encoder.items} == {
            "messages[0].parts[1].image", "messages[0].parts[2].image", "messages[2].parts[0].image",
        }  # fmt: skip
        await s.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": "{}"},
        {"regex": "a"},
        {"choice": {"texts": ["x", "y"]}},
        {"grammar": 'start: "a"'},
        {"json_object": True},
        {},
    ],
    ids=str,
)
async def test_how_to_choose_tokens_reaches_the_language_model(qwen: Path, constraint: dict[str, Any]) -> None:
    told = sampling_pb2.SamplingParams(
        repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2, logit_bias={3: 4.5, 5: -100}, priority=-7,
        visual_token_keep=0.25, max_tokens=9, **constraint,
    )  # fmt: skip
    async with stack(qwen) as s:
        await answer(s, gateway_pb2.ChatRequest(messages=[user("a")], sampling=told))
        [sent] = s.llm.requests
        told.MergeFrom(sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, min_tokens=0))
        told.MergeFrom(sampling_pb2.SamplingParams(ignore_eos=False, include_first_logits=False))
        assert sent.sampling == told


@pytest.mark.asyncio
@pytest.mark.parametrize("per_delta", [1, 2, 100])
async def test_stop_strings_end_the_answer_early(qwen: Path, per_delta: int) -> None:
    async with stack(qwen) as s:
        ids = encode(qwen, "one two three four five")
        s.llm.script = Script([ids[i : i + per_delta] for i in range(0, len(ids), per_delta)])
        s.llm.gate.clear()
        call = s.stub.Chat(ask("x", stop=["wo thr"]))
        asyncio.get_running_loop().call_later(0.05, s.llm.gate.set)
        events = [event async for event in call]
        assert text_of(events) == "one t" and events[-1].done.finish_reason == STOP
        assert events[-1].done.usage.completion_tokens == len(tokens_of(events)) < len(ids)
        assert events[-1].done.usage.prompt_tokens_details.cached == 3 and events[-1].done.stage_times.HasField("decode")
        await s.idle()


@pytest.mark.asyncio
async def test_a_stop_string_in_the_last_held_text(qwen: Path) -> None:
    async with stack(qwen) as s:
        s.llm.script = Script([encode(qwen, "one two")], LENGTH)
        events = await answer(s, ask("x", stop=["two three"]))
        assert text_of(events) == "one two" and events[-1].done.finish_reason == LENGTH


@pytest.mark.asyncio
async def test_first_logits_pass_through(qwen: Path) -> None:
    async with stack(qwen) as s:
        events = await answer(s, ask("x", include_first_logits=True))
        assert events[1].delta.first_logits.data == b"12345678"
        assert not any(event.delta.HasField("first_logits") for event in await answer(s, ask("x")))


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["queue", "encode", "generate"])
async def test_cancel_gives_everything_back(qwen: Path, where: str) -> None:
    async with stack(qwen, max_num_running=1) as s:
        blocker, before = None, await s.load()
        if where == "queue":
            s.llm.gate.clear()
            blocker = s.stub.Chat(ask("first"))
            await blocker.read()
        (s.encoder if where == "encode" else s.llm).gate.clear()
        call = s.stub.Chat(ask("x", picture(), picture(60, 60)))
        if where == "queue":
            await until(lambda: s.service.ledger.queued == 1)
        else:
            assert (await call.read()).HasField("admitted")
            await until(lambda: len(s.encoder.items) == 2 if where == "encode" else s.llm.running == 1)
            if where == "generate":
                assert (await call.read()).HasField("delta")
        call.cancel()
        if where == "queue":
            await until(lambda: s.service.ledger.queued == 0)
        elif where == "encode":
            await until(lambda: s.service.ledger.running == 0)
            s.encoder.gate.set()  # only now are the refs known, and given back
        else:
            await until(lambda: s.llm.cancelled == 1)
        if blocker is not None:
            blocker.cancel()
        await s.idle()
        async with asyncio.timeout(PATIENCE):
            while await s.load() != before:  # tasks, too
                await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_the_deadline_reaches_everyone(qwen: Path) -> None:
    async with stack(qwen) as s:
        s.llm.gate.clear()
        with refused(CODE.DEADLINE_EXCEEDED):
            await answer(s, ask("x", picture()), timeout=2)
        await until(lambda: s.llm.cancelled == 1)
        await s.idle()


@pytest.mark.asyncio
async def test_the_deadline_passes_in_the_queue(qwen: Path) -> None:
    async with stack(qwen, max_num_running=1) as s:
        s.llm.gate.clear()
        running = s.stub.Chat(ask("first"))
        await running.read()
        with refused(CODE.DEADLINE_EXCEEDED):
            await answer(s, ask("second"), timeout=0.4)
        running.cancel()
        await s.idle()


@pytest.mark.asyncio
async def test_errors_of_the_backends_keep_their_details(qwen: Path) -> None:
    async with stack(qwen) as s:
        field = "messages[0].parts[1].image"
        s.llm.script = Script([], error=invalid(field, "the picture is cut off", reason="IMAGE_TRUNCATED"))
        with refused(INVALID, "cut off") as errors:
            await answer(s, ask("x", picture()))
        assert (errors[0].field, errors[0].reason) == (field, "IMAGE_TRUNCATED")
        s.encoder.error = ServiceError(CODE.RESOURCE_EXHAUSTED, "the encoder is full", reason="ENCODER_FULL", retry_delay=2)
        with refused(CODE.RESOURCE_EXHAUSTED, "encoder is full") as errors:
            await answer(s, ask("x", picture(), picture()))
        assert errors[0].retry_delay == 2
        s.encoder.error = None
        gone = ServiceError(CODE.NOT_FOUND, "this ref is not held here", reason="REF_NOT_FOUND", metadata={"ref_id": "7"})
        s.llm.script = Script([], error=gone)  # an encoder that restarted: not what a client asked for
        with refused(CODE.UNAVAILABLE, "lost the request's media"):
            await answer(s, ask("x", picture()))
        s.llm.script = Script(complete=False)
        with refused(CODE.INTERNAL, "too early"):
            await answer(s, ask("x"))
        await s.idle()


@pytest.mark.asyncio
async def test_too_long(qwen: Path) -> None:
    async with stack(qwen, max_model_len=60) as s:
        with refused(INVALID, "limit is 60") as errors:
            await answer(s, ask("word " * 200))
        assert (errors[0].field, errors[0].reason) == ("messages", "CONTEXT_LENGTH_EXCEEDED")
        assert errors[0].metadata["limit"] == "60" and int(errors[0].metadata["requested"]) > 60
        prompt = (await answer(s, ask("hi", max_tokens=1)))[-1].done.usage.prompt_tokens
        with refused(INVALID, f"at most {60 - prompt}") as errors:
            await answer(s, ask("hi", max_tokens=61 - prompt))
        assert (errors[0].field, errors[0].metadata["requested"]) == ("sampling.max_tokens", "61")
        await answer(s, ask("hi", max_tokens=60 - prompt))
        await answer(s, ask("hi"))
        assert s.llm.requests[-1].sampling.max_tokens == 60 - prompt
        with refused(INVALID) as errors:
            await answer(s, ask("hi", min_tokens=61))
        assert errors[0].field == "sampling.min_tokens"
        await s.idle()


@pytest.mark.asyncio
async def test_queue_full_and_never_fitting(qwen: Path) -> None:
    async with stack(qwen, max_num_running=1, max_queued_requests=1, default_max_tokens=8) as s:
        s.llm.gate.clear()
        first = s.stub.Chat(ask("first"))
        await first.read()
        with refused(INVALID, "the limit is 1000") as errors:
            await answer(s, ask("huge", max_tokens=16_000))
        assert errors[0].reason == "KV_CAPACITY_EXCEEDED" and errors[0].metadata["limit"] == "1000"
        assert int(errors[0].metadata["requested"]) > 1000
        second = asyncio.create_task(answer(s, ask("second")))
        await until(lambda: s.service.ledger.queued == 1)
        load = await s.load()
        assert (load.running_requests, load.queued_requests, load.total_kv_blocks) == (1, 1, 1000) and load.reserved_kv_blocks > 0
        with refused(CODE.RESOURCE_EXHAUSTED) as errors:
            await answer(s, ask("third"))
        assert errors[0].reason == "QUEUE_FULL" and errors[0].retry_delay == 1 and (await s.load()).refused_requests == 1
        s.llm.gate.set()
        assert (await second)[-1].HasField("done") and await last(first)
        await s.idle()


@pytest.mark.asyncio
async def test_readiness_follows_the_backends(qwen: Path) -> None:
    async with stack(qwen) as s:
        assert s.readiness.ready
        s.llm.load.model_fingerprint = "another"
        await s.service.backends.refresh()
        assert not s.service.backends.ready
        s.llm.load.model_fingerprint = open_checkpoint(str(qwen)).fingerprint
        await until(lambda: s.readiness.ready and s.service.backends.ready)
        assert s.service._poller is not None and s.service._poller.cancel()  # else it is ready again at the next poll
        s.service.backends.encoders[0].ready = False
        with refused(CODE.UNAVAILABLE, "no encoder") as errors:
            await answer(s, ask("x", picture()))
        assert errors[0].retry_delay
        assert text_of(await answer(s, ask("x")))  # text needs none
        s.service.ledger.close(s.llm_address)
        with refused(CODE.UNAVAILABLE, "no language model"):
            await answer(s, ask("x"))
        await s.idle()


@pytest.mark.asyncio
async def test_estimates_touch_no_backend(qwen: Path) -> None:
    async with stack(qwen) as s:
        request = ask("hello", picture(280, 140), max_tokens=100)
        estimate = await s.stub.EstimateTokens(
            gateway_pb2.EstimateTokensRequest(messages=request.messages, sampling=request.sampling)
        )
        assert not s.llm.requests and not s.encoder.items
        admitted = (await answer(s, request))[0].admitted
        assert (estimate.prompt_tokens_details, list(estimate.media)) == (admitted.prompt_tokens, list(admitted.media))
        assert estimate.prompt_tokens == len(s.llm.requests[0].token_ids) == estimate.cost.prefill_tokens
        assert estimate.cost.kv_blocks == -(-(estimate.prompt_tokens + 100) // 16)
        assert (estimate.cost.encoder_patches, estimate.cost.host_bytes) == (200, len(picture(280, 140)))
        assert estimate.max_model_len == 32768
        s.llm.load.max_model_len = 2048
        await s.service.backends.refresh()
        [model] = (await s.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert (model.name, model.family, model.max_model_len) == ("qwen2_vl", "qwen2_vl", 2048)
        assert list(model.modalities) == [media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_VIDEO]


@pytest.mark.asyncio
async def test_a_long_prompt_does_not_block_the_loop(qwen: Path) -> None:
    async with stack(qwen, max_model_len=10) as s:
        before = time.thread_time()  # of the loop's thread, which client and gateway share
        with refused(INVALID, "limit is 10"):
            await answer(s, ask("a word or two " * 100_000))
        assert time.thread_time() - before < 0.5  # tokenising takes seconds


@pytest.mark.asyncio
async def test_long_texts_do_not_hold_up_short_ones(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More long texts than threads wait to be tokenised for as long as it likes; a short request passes them all."""
    begun, go_on = threading.Event(), threading.Event()
    make = PromptMaker.make

    def slow_for_long_texts(self: PromptMaker, conversation: Conversation, media: list[Probed]) -> Prompt:
        if any(len(p) > 100_000 for m in conversation.messages for p in m.parts if isinstance(p, str)):
            begun.set()
            assert go_on.wait(PATIENCE)
        return make(self, conversation, media)

    monkeypatch.setattr(PromptMaker, "make", slow_for_long_texts)
    async with stack(qwen) as s:
        s.llm.script = Script([[5]], LENGTH)
        long = [asyncio.create_task(answer(s, ask("word " * 40_000))) for _ in range(16)]
        assert await asyncio.to_thread(begun.wait, 30)
        try:
            assert (await answer(s, ask("hello"), timeout=10))[-1].HasField("done")
            assert not any(task.done() for task in long)
        finally:
            go_on.set()
        refusals = await asyncio.gather(*long, return_exceptions=True)
        assert all(isinstance(r, grpc.aio.AioRpcError) and r.code() == INVALID for r in refusals)


@pytest.mark.asyncio
async def test_text_only_family(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("llama"), with_encoder=False) as s:
        assert s.readiness.ready and not s.encoder.items
        events = await answer(s, ask("hello"))
        assert events[-1].done.usage.prompt_tokens_details.image == 0
        [model] = (await s.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert not model.modalities
