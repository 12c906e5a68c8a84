"""OpenAI's client and bare HTTP against a running stack; every case of tests/data/cases through both doors."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from services.common.errors import ServiceError
from tests.media_files import file_bytes, picture, recording, tone
from tests.patience import PATIENCE
from tests.stack.conftest import RunningStack
from tests.stack.http_cases import PARAMS, media_body, media_param, request_bodies
from tests.stack.odd_cases import INVALID, Odd, media_cases, request_cases
from tests.stack.odd_client import SEEN_BY_NO_CLIENT, Answer, client_of
from triptych.common.v1 import sampling_pb2
from triptych.gateway.v1 import gateway_pb2

BODIES = request_bodies()
GRPC = {odd.name: odd for odd in request_cases()}
REFUSED = sorted(name for name in BODIES if name not in GRPC or GRPC[name].outcome == INVALID)
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def stack(start_stack: Callable[[str], RunningStack]) -> RunningStack:
    return start_stack("qwen2_5_omni_thinker")


@asynccontextmanager
async def http_client(stack: RunningStack) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://{stack.stack.http_address}", timeout=60) as client:
        yield client


def openai_client(stack: RunningStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{stack.stack.http_address}/v1", api_key="none", timeout=60, max_retries=0)


async def post(client: httpx2.AsyncClient, path: str, body: bytes) -> httpx2.Response:
    return await client.post(path, content=body, headers={"content-type": "application/json"})


async def same_through_both_doors(stack: RunningStack, odd: Odd, body: bytes, param: str | None) -> None:
    """gRPC's outcome, checked as ever, and that of the HTTP door: the same tokens for the same cost, or the same refusal."""
    async with client_of(stack) as grpc_client, http_client(stack) as client:
        expected = await grpc_client.check(odd)
        estimated, answered = [await post(client, path, body) for path in ("/v1/estimate", "/v1/chat/completions")]
    if isinstance(expected, ServiceError):
        error = answered.json()["error"]
        assert (answered.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), f"{odd}: {error}"
        assert not SEEN_BY_NO_CLIENT.search(error["message"]), f"{odd}: {error}"
        if odd.modality:
            assert error["message"] == f"{param}{expected.message.removeprefix(odd.refused[0])}", odd
        # What only decoding finds out, an estimate does not know.
        assert estimated.status_code == 200 or estimated.json()["error"] == error, odd
        return
    assert isinstance(expected, Answer) and answered.status_code == estimated.status_code == 200, f"{odd}: {answered.text}"
    cost, whole, estimate = estimated.json(), answered.json(), expected.estimate
    assert cost["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == estimate.prompt_tokens, odd
    shown = [(item["tokens"], item["width"] or 0, item["height"] or 0, *item["grid"].values()) for item in cost["media"]]
    assert shown == [(m.tokens, m.width, m.height, m.grid.t, m.grid.h, m.grid.w) for m in estimate.media], odd
    for figure in ("kv_blocks", "host_bytes"):  # the others depend on what encoder and language model have by now
        assert cost["cost"][figure] == getattr(estimate.cost, figure), odd
    assert whole["choices"][0]["token_ids"] == expected.tokens, odd
    assert whole["choices"][0]["message"]["content"] == "".join(r.delta.text for r in expected.responses), odd


@pytest.mark.parametrize("odd", list(media_cases()), ids=str)
def test_media_through_both_doors(odd: Odd, stack: RunningStack) -> None:
    asyncio.run(same_through_both_doors(stack, odd, json.dumps(media_body(odd)).encode(), media_param(odd)))


@pytest.mark.parametrize("name", GRPC)
def test_requests_through_both_doors(name: str, stack: RunningStack) -> None:
    asyncio.run(same_through_both_doors(stack, GRPC[name], BODIES[name], PARAMS.get(name)))


def test_bad_requests_cost_nothing(stack: RunningStack) -> None:
    async def work() -> None:
        async with http_client(stack) as client:
            before = stack.loads()
            for name in REFUSED:
                seconds = []
                for _ in range(3):
                    started = time.perf_counter()
                    reply = await post(client, "/v1/chat/completions", BODIES[name])
                    seconds.append(time.perf_counter() - started)
                    error = reply.json()["error"]
                    assert (reply.status_code, error["param"]) == (400, PARAMS[name]), f"{name}: {error}"
                assert min(seconds) < 0.1, name
            after = stack.loads()
            assert (after.llm.steps, after.gateway.finished_requests) == (before.llm.steps, before.gateway.finished_requests)
            assert after.encoder.cache_misses == before.encoder.cache_misses

    asyncio.run(work())


@pytest.mark.asyncio
async def test_openai_s_client_with_every_modality(stack: RunningStack) -> None:
    image = base64.b64encode(file_bytes(picture(200, 100, seed=3))).decode()
    sound = base64.b64encode(recording(tone(0.5, 16_000), 16_000, "wav", "pcm_s16le", "s16")).decode()
    content: Any = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}", "detail": "auto"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    options: Any = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    async with openai_client(stack) as client:
        whole = await client.chat.completions.create(**options)
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.audio_tokens and whole.usage.prompt_tokens_details.model_dump()["image"]
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert last.usage is not None and last.usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.asyncio
async def test_openai_s_client_constrains_what_is_answered(stack: RunningStack) -> None:
    async with openai_client(stack) as client:
        schema: Any = {"name": "answer", "strict": True, "schema": {"enum": ["yes"]}}
        format: Any = {"type": "json_schema", "json_schema": schema}
        answer = await client.chat.completions.create(model="default", messages=HI, response_format=format, max_tokens=40)
        assert json.loads(answer.choices[0].message.content or "") == "yes"
        extra = {"guided_choice": ["left", "right"]}
        answer = await client.chat.completions.create(model="default", messages=HI, extra_body=extra, max_tokens=40)
        assert answer.choices[0].message.content in ("left", "right")
        seeded: Any = {"model": "default", "messages": HI, "temperature": 1.5, "seed": 11, "max_tokens": 8}
        one, other = [(await client.chat.completions.create(**seeded)).choices[0].message.content for _ in range(2)]
        assert one == other


@pytest.mark.asyncio
async def test_leaving_a_stream_frees_the_stack(stack: RunningStack) -> None:
    async with openai_client(stack) as client:
        await client.chat.completions.create(model="default", messages=HI, max_tokens=1)
        before = await asyncio.to_thread(stack.wait_until, lambda loads: not loads.busy())
        options: Any = {"max_tokens": 30000, "stream": True, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        stream = await client.chat.completions.create(model="default", messages=HI, **options)
        await anext(aiter(stream))
        assert stack.loads().llm.running_sequences == 1
        await stream.close()
        await asyncio.to_thread(stack.wait_until, lambda loads: not loads.busy() and loads.tasks() <= before.tasks())


def test_sixteen_bodies_at_once_beside_good_ones(stack: RunningStack) -> None:
    good = json.dumps({"messages": HI, "max_tokens": 3, "temperature": 0}).encode()

    async def work() -> None:
        gate = asyncio.Semaphore(16)
        async with http_client(stack) as client:
            expected = (await post(client, "/v1/chat/completions", good)).json()["choices"]

            async def one(name: str) -> None:
                async with gate:
                    reply = await post(client, "/v1/chat/completions", BODIES[name])
                    assert reply.status_code == (400 if name in REFUSED else 200), f"{name}: {reply.text}"
                    assert (await post(client, "/v1/chat/completions", good)).json()["choices"] == expected

            async with asyncio.TaskGroup() as group:
                for name in BODIES:
                    group.create_task(one(name))

    asyncio.run(work())
    stack.wait_until(lambda loads: not loads.busy())


def test_every_event_of_both_doors_is_logged_without_what_was_said(stack: RunningStack) -> None:
    marker = "a question that nobody may log"

    async def work() -> None:
        async with openai_client(stack) as client:
            await client.chat.completions.create(model="default", messages=[{"role": "user", "content": marker}], max_tokens=1)

    asyncio.run(work())
    events = stack.events("gateway")
    assert any(event["event"] == "http call" and event["status"] == 200 for event in events)
    assert marker not in json.dumps(events)


def test_a_message_of_grpc_and_its_json_are_one_request(stack: RunningStack) -> None:
    """The door translates to the very message: the language model is told the same."""
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_SYSTEM, parts=[gateway_pb2.Part(text="be brief")])
    user = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.Part(text="hi")])
    request = gateway_pb2.ChatRequest(messages=[message, user])
    request.sampling.max_tokens, request.sampling.temperature = 8, 0

    async def work() -> None:
        tokens, _ = await stack.tokens(request)
        body = {"messages": [{"role": "developer", "content": "be brief"}, *HI], "max_completion_tokens": 8, "temperature": 0}
        async with http_client(stack) as client:
            reply = await post(client, "/v1/chat/completions", json.dumps({**body, "return_token_ids": True}).encode())
        assert reply.json()["choices"][0]["token_ids"] == tokens

    asyncio.run(work())


def test_both_doors_estimate_alike_what_is_left_to_compute(stack: RunningStack) -> None:
    """A prompt that was answered is not prefilled again: its reservation falls, and nothing of it stays."""
    text = "a beginning that comes again " * 20
    message = gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=[gateway_pb2.Part(text=text)])
    request = gateway_pb2.ChatRequest(messages=[message])
    request.sampling.max_tokens, request.sampling.temperature = 2, 0
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}

    async def work() -> None:
        async with client_of(stack) as grpc_client, http_client(stack) as client:

            async def estimate() -> gateway_pb2.EstimateTokensResponse:
                """Through both doors."""
                asked = gateway_pb2.EstimateTokensRequest(messages=request.messages, sampling=request.sampling)
                found = await grpc_client.stub.EstimateTokens(asked, timeout=60)
                cost = (await post(client, "/v1/estimate", json.dumps(body).encode())).json()["cost"]
                assert cost == {field.name: getattr(found.cost, field.name) for field in found.cost.DESCRIPTOR.fields}
                return found

            whole = await estimate()
            assert whole.cost.prefill_tokens > 2 * whole.prompt_tokens // 3  # others may have begun like it
            before = (await grpc_client.ask(request)).done.usage.prompt_tokens_details
            async with asyncio.timeout(PATIENCE):  # until a poll has shown that the language model looks prompts up
                while (again := await estimate()).cost.prefill_tokens >= 32:
                    pass
            assert again.prompt_tokens == whole.prompt_tokens and again.cost.kv_blocks == whole.cost.kv_blocks
            after = (await grpc_client.ask(request)).done.usage.prompt_tokens_details
            assert after.cached > before.cached and after.cached >= whole.prompt_tokens - again.cost.prefill_tokens
            assert again.expected_wait_seconds == 0

    asyncio.run(work())
    loads = stack.wait_until(lambda loads: not loads.busy())
    assert loads.gateway.reserved == gateway_pb2.Cost()


@pytest.mark.asyncio
async def test_several_answers_and_how_likely_their_tokens_were_through_both_doors(stack: RunningStack) -> None:
    """Drawn with a seed: whole, in a stream and over gRPC they are the same, token by token."""
    image = file_bytes(picture(120, 80, seed=5))
    parts = [gateway_pb2.Part(image=gateway_pb2.Media(data=image)), gateway_pb2.Part(text="what?")]
    request = gateway_pb2.ChatRequest(messages=[gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)])
    sampling = sampling_pb2.SamplingParams(n=2, seed=9, temperature=1.5, max_tokens=7, logprobs=3, ignore_eos=True)
    request.sampling.CopyFrom(sampling)
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    options: Any = {
        "model": "default", "messages": [{"role": "user", "content": content}], "n": 2, "seed": 9, "temperature": 1.5,
        "max_tokens": 7, "logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip

    async with openai_client(stack) as client:
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
    _, responses = await stack.tokens(request)
    assert whole.usage is not None and last.usage is not None and not last.choices
    assert whole.usage.completion_tokens == last.usage.completion_tokens == responses[-1].done.usage.completion_tokens == 14
    for index, choice in enumerate(whole.choices):
        assert (choice.index, choice.finish_reason) == (index, "length")
        deltas = [response.delta for response in responses if response.HasField("delta") and response.delta.index == index]
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == index]
        text = "".join(delta.text for delta in deltas)
        assert choice.message.content == "".join(piece.delta.content or "" for piece in pieces) == text
        token_ids = [token for delta in deltas for token in delta.token_ids]
        streamed = [token for piece in pieces for token in (piece.model_extra or {}).get("token_ids", ())]
        assert (choice.model_extra or {})["token_ids"] == streamed == token_ids and len(token_ids) == 7
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        told = [token for delta in deltas for token in delta.logprobs]
        assert choice.logprobs is not None and all(len(token.top) == 3 for token in told)
        for found in (choice.logprobs.content, [t for p in pieces if p.logprobs for t in p.logprobs.content or ()]):
            assert [token_and_alternatives(token) for token in found or ()] == [
                [(t.token, list(t.bytes), pytest.approx(t.logprob, abs=1e-4)) for t in (token, *token.top)] for token in told
            ]
    assert whole.choices[0].message.content != whole.choices[1].message.content


def token_and_alternatives(told: Any) -> list[tuple[str, list[int], float]]:
    """A token as OpenAI's client shows it, then what else might have come."""
    return [(token.token, token.bytes, token.logprob) for token in (told, *told.top_logprobs)]
