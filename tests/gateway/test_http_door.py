"""The HTTP door of a gateway between a fake encoder and a fake language model."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from gateway_fakes import Script, Stack, picture, stack, until
from tokenizers import Tokenizer

from services.common.errors import ServiceError, invalid
from services.gateway import service
from services.gateway.http import server
from tests.patience import PATIENCE
from triptych.common.v1 import usage_pb2

Directory = Callable[[str], Path]
HI: Any = [{"role": "user", "content": "hi"}]
STOP = usage_pb2.FINISH_REASON_STOP
CHAT = "/v1/chat/completions"


@pytest.fixture
def qwen(checkpoint_dir: Directory) -> Path:
    return checkpoint_dir("qwen2_vl")


@pytest.fixture
def llava(checkpoint_dir: Directory) -> Path:
    """Takes pictures only, so that its gateway has no worker processes to start."""
    return checkpoint_dir("llava")


@asynccontextmanager
async def door(checkpoint: Path, **options: Any) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI, httpx2.AsyncClient]]:
    """A gateway with its fakes, OpenAI's client of it, and a plain one."""
    async with stack(checkpoint, http_port=0, **options) as s:
        base = f"http://{s.service.http.address}"  # type: ignore[union-attr]
        async with (
            asyncio.timeout(60),
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="secret-key", max_retries=0, timeout=20) as client,
            httpx2.AsyncClient(base_url=base, timeout=20) as http,
        ):
            yield s, client, http


@asynccontextmanager
async def connection(s: Stack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Bare bytes to the door and from it."""
    host, _, port = s.service.http.address.rpartition(":")  # type: ignore[union-attr]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def request_bytes(body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {CHAT} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def script(checkpoint: Path, text: str, error: ServiceError | None = None) -> Script:
    """An answer of this text, a token a delta."""
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return Script([[token] for token in ids], STOP, error)


def events_of(text: str) -> list[str]:
    """The data of server-sent events."""
    assert text.endswith("\n\n") and text.isascii()
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


@pytest.mark.asyncio
async def test_openai_s_client_gets_the_same_answer_in_one_piece_and_in_many(qwen: Path) -> None:
    text = "Größe 👩‍👩‍👧 a\u2028b\x85 ok"
    async with door(qwen) as (s, client, _):
        s.llm.script = script(qwen, text)
        url = "data:image/png;base64," + base64.b64encode(picture(280, 140)).decode()
        parts = [{"type": "text", "text": "What"}, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
        messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
        whole = await client.chat.completions.create(
            model="default", messages=messages, seed=5, extra_headers={"x-request-id": "abc"}
        )
        assert (whole.id, whole.object, whole.model) == ("chatcmpl-abc", "chat.completion", "qwen2_vl")
        [choice] = whole.choices
        assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", text)
        assert (choice.finish_reason, choice.logprobs) == ("stop", None)
        usage = whole.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        details = usage.prompt_tokens_details.model_dump()
        assert (details["image"], details["cached_tokens"], details["audio_tokens"]) == (50, 3, 0)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens == sum(details[m] for m in ("text", "image", "audio", "video"))
        assert whole.model_dump()["stage_times"]["prefill"] == 0.25
        assert s.llm.requests[0].request_id == "abc" and s.llm.requests[0].sampling.seed == 5
        assert s.encoder.items[0].data == picture(280, 140)

        stream = await client.chat.completions.create(
            model="qwen2_vl", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.usage is None for chunk in chunks)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert not last.choices and last.usage == usage and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        await s.idle()


@pytest.mark.asyncio
async def test_the_stream_as_bytes(llava: Path) -> None:
    async with door(llava) as (s, _, http):
        s.llm.script = script(llava, "ä\u2028ö")
        reply = await http.post(CHAT, json={"messages": HI, "stream": True, "return_token_ids": True})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache" and "access-control-allow-origin" not in reply.headers
        *chunks, done = events_of(reply.text)
        assert done == "[DONE]" and not any("usage" in json.loads(chunk) for chunk in chunks)
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "ä\u2028ö"
        sent = [token for delta in s.llm.script.deltas for token in delta]
        assert [token for choice in choices for token in choice.get("token_ids", [])] == sent


@pytest.mark.asyncio
async def test_bad_requests_name_the_client_s_own_field(llava: Path) -> None:
    async with door(llava) as (s, client, http):
        bad: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}]}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="default", messages=bad)
        error = refused.value
        assert (error.param, error.code, error.type) == (
            "messages[0].content[0].image_url.url", "bad_media", "invalid_request_error",
        )  # fmt: skip
        assert "messages[0].content[0].image_url.url: not a picture that can be read" in error.message
        for options, param, code in (
            ({"max_completion_tokens": 0}, "max_completion_tokens", None),
            ({"n": 5_000_000}, "n", None),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
            ({"stop": [""]}, "stop[0]", None),
            ({"stop": ""}, "stop", None),
            ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
            ({"extra_body": {"guided_choice": []}}, "guided_choice", None),
            ({"extra_body": {"best_off": 2}}, "best_off", "unknown_field"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="default", messages=HI, **options)  # type: ignore[call-overload]
            assert (refused.value.param, refused.value.code) == (param, code), refused.value
            assert refused.value.message.startswith(f"Error code: 400 - {param}: ")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-5", messages=HI)
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        reply = await http.post(CHAT, content=b'{"messages": [', headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
        assert not s.llm.requests and not s.encoder.items


@pytest.mark.asyncio
async def test_what_fails_before_the_first_word_has_a_status_even_in_a_stream(llava: Path) -> None:
    async with door(llava) as (s, client, http):
        part = "messages[0].parts[0].image"
        s.encoder.error = invalid(part, "its pixels are damaged", reason="BAD_MEDIA")
        url = "data:;base64," + base64.b64encode(picture()).decode()
        shown: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="default", messages=shown, stream=True)
        assert refused.value.param == "messages[0].content[0].image_url"
        s.llm.script = Script([], error=invalid("sampling.regex", "became too complex to follow"))
        with pytest.raises(openai.BadRequestError, match="guided_regex: became too complex") as refused:
            await client.chat.completions.create(model="default", messages=HI, extra_body={"guided_regex": "a"})
        assert refused.value.param == "guided_regex"
        s.llm.script = Script([], error=ServiceError(grpc.StatusCode.INTERNAL, "a secret of the engine"))
        reply = await http.post(CHAT, json={"messages": HI, "stream": True})
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
        await s.idle()


@pytest.mark.asyncio
async def test_a_bug_is_opaque(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with door(llava) as (s, client, _):
        monkeypatch.setattr(s.service.http._door._routes["/v1/chat/completions"].answer.__self__, "_servicer", None)  # type: ignore[union-attr]
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="default", messages=HI, extra_headers={"x-request-id": "r-1"})
        assert failed.value.status_code == 500 and failed.value.request_id == "r-1"
        assert "under request id r-1" in failed.value.message and "NoneType" not in failed.value.message


@pytest.mark.asyncio
async def test_a_failure_in_mid_stream_is_an_event_and_no_end(llava: Path) -> None:
    async with door(llava) as (s, client, http):
        s.llm.script = script(
            llava, "so far", ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the model is full", retry_delay=1)
        )
        stream = await client.chat.completions.create(model="default", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the model is full"):
            async for _ in stream:
                pass
        reply = await http.post(CHAT, json={"messages": HI, "stream": True})
        *_, last = events_of(reply.text)
        assert reply.status_code == 200 and "[DONE]" not in reply.text
        assert json.loads(last)["error"] == {
            "message": "the model is full", "type": "rate_limit_error", "param": None, "code": None,
        }  # fmt: skip
        await s.idle()


@pytest.mark.asyncio
async def test_overload_says_when_to_try_again(llava: Path) -> None:
    async with door(llava, max_num_running=1, max_queued_requests=0) as (s, client, http):
        s.llm.gate.clear()
        running = asyncio.create_task(client.chat.completions.create(model="default", messages=HI))
        await until(lambda: s.llm.running == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="default", messages=HI)
        headers = refused.value.response.headers
        assert 1 <= int(headers["retry-after"]) <= 600 and int(headers["retry-after-ms"]) >= 1
        assert refused.value.type == "rate_limit_error" and refused.value.code
        for path in ("/v1/estimate", "/tokenize"):  # which look at a conversation as an answer does
            reply = await http.post(path, json={"messages": HI})
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full"), reply.text
        assert not s.service.ledger.gate.arriving
        s.llm.gate.set()
        assert (await running).choices[0].finish_reason == "length"


@pytest.mark.asyncio
async def test_a_deadline_ends_the_request(llava: Path) -> None:
    async with door(llava) as (s, _, http):
        s.llm.gate.clear()
        reply = await http.post(CHAT, json={"messages": HI}, headers={"x-request-timeout": "0.4"})
        assert reply.status_code == 504
        await until(lambda: not s.llm.running)
        for wrong in ("soon", "-1", "nan"):
            reply = await http.post(CHAT, json={"messages": HI}, headers={"x-request-timeout": wrong})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_header")
        for path, body in (("/v1/estimate", {"messages": HI}), ("/tokenize", {"messages": HI}), ("/tokenize", {"prompt": "x"})):
            for seconds, status in (("soon", 400), ("0.000001", 504)):
                assert (await http.post(path, json=body, headers={"x-request-timeout": seconds})).status_code == status
        await s.idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything_at_once(llava: Path, stream: bool) -> None:
    async with door(llava) as (s, _, http):
        await http.post(CHAT, json={"messages": HI})  # from here on the number of tasks stays
        before = (await s.load()).tasks
        s.llm.gate.clear()
        async with connection(s) as (reader, writer):
            writer.write(request_bytes({"messages": HI, "stream": stream, "return_token_ids": True}))
            await until(lambda: s.llm.running == 1)
            if stream:
                await reader.readuntil(b"data: ")
            assert (await s.load()).running_requests == 1
        async with asyncio.timeout(PATIENCE):
            while (load := await s.load()).running_requests or load.reserved_kv_blocks or load.tasks > before:
                await asyncio.sleep(0.005)
        await until(lambda: s.llm.cancelled == 1)
        await s.idle()


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_it_waits_is_out_of_the_queue(llava: Path) -> None:
    async with door(llava, max_num_running=1) as (s, client, _):
        s.llm.gate.clear()
        running = asyncio.create_task(client.chat.completions.create(model="default", messages=HI))
        await until(lambda: s.llm.running == 1)
        async with connection(s) as (_, writer):
            writer.write(request_bytes({"messages": HI}))
            await until(lambda: s.service.ledger.queued == 1)
        await until(lambda: s.service.ledger.queued == 0)
        s.llm.gate.set()
        await running


@pytest.mark.asyncio
async def test_bodies_have_a_limit(llava: Path) -> None:
    async with door(llava, max_http_body_bytes=100_000) as (s, client, http):
        long = {"messages": [{"role": "user", "content": "x" * 200_000}]}
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="default", messages=long["messages"])  # type: ignore[arg-type]
        assert refused.value.status_code == 413 and "100000 bytes" in refused.value.message

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 10_000

        reply = await http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        async with connection(s) as (reader, writer):  # by what it says of itself, before any of it came
            head = request_bytes(long).partition(b"\r\n\r\n")[0]
            writer.write(head + b"\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 413 ")
        async with connection(s) as (reader, writer):  # a client that asks first is not told to go on
            writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 413 ")
        assert not s.llm.requests


@pytest.mark.asyncio
async def test_all_bodies_together_have_a_limit_and_small_ones_pass(llava: Path) -> None:
    async with door(llava, max_media_bytes=300_000) as (s, _, http):
        s.llm.gate.clear()
        large = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "x" * 200_000}]}
        first = asyncio.create_task(http.post(CHAT, json=large))
        await until(lambda: s.llm.running == 1)
        full = await http.post(CHAT, json=large)
        assert (full.status_code, full.json()["error"]["code"], full.headers["retry-after"]) == (429, "media_full", "1")
        small = asyncio.create_task(http.post(CHAT, json={"messages": HI}))
        await until(lambda: s.llm.running == 2)
        s.llm.gate.set()
        assert [(await answer).status_code for answer in (first, small)] == [200, 200]
        assert (await http.post(CHAT, json=large)).status_code == 200
        longest = {"messages": [{"role": "user", "content": "hi", "name": "x" * 400_000}]}
        assert (await http.post(CHAT, json=longest)).status_code == 200  # more than all, when nobody else holds any
        await s.idle()


@pytest.mark.asyncio
async def test_a_caller_that_may_not_is_refused_before_its_body_is_read(llava: Path) -> None:
    async with door(llava) as (s, _, http):

        async def nobody(request: Any, context: Any) -> None:
            raise ServiceError(grpc.StatusCode.UNAUTHENTICATED, "an API key is needed here", reason="UNAUTHENTICATED")

        s.service._servicer.ListModels = nobody  # type: ignore[method-assign]
        for path, route in s.service.http._door._routes.items():  # type: ignore[union-attr]
            body = {"json": {"messages": HI}} if route.method == "POST" else {}
            await until(lambda: s.service.backends.ready)  # on a busy machine a backend may seem away for a moment
            reply = await http.request(route.method, path, **body)
            if path in ("/", "/health"):
                assert reply.status_code == 200
                continue
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), path
            assert reply.json()["error"]["type"] == "authentication_error"
        async with connection(s) as (reader, writer):
            writer.write(request_bytes({"messages": HI}).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 401 ")


@pytest.mark.asyncio
async def test_a_client_that_stops_sending_or_reading_is_let_go(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HTTP_STALL_SECONDS", 0.4)
    async with door(llava, max_model_len=30_000) as (s, _, _):
        async with connection(s) as (reader, writer):
            writer.write(request_bytes({"messages": HI})[:-1])
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 408 ")
        s.llm.script = Script([[1] * 2000] * 2000)
        host, _, port = s.service.http.address.rpartition(":")  # type: ignore[union-attr]
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(request_bytes({"messages": HI, "stream": True, "return_token_ids": True}))
            await until(lambda: s.service.ledger.running == 1)
            await until(lambda: s.service.ledger.running == 0)
        assert (await s.load()).finished_requests == 0
        await s.idle()


@pytest.mark.asyncio
async def test_the_head_of_a_request_must_come_in_time_and_have_a_size(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.2)
    async with door(llava) as (s, _, _):
        for said in (b"", b"POST / HTTP/1.1\r\nhost: x\r\n"):
            async with connection(s) as (reader, writer):
                writer.write(said)
                with pytest.raises(ConnectionResetError):
                    await asyncio.wait_for(reader.read(), PATIENCE)
                    raise ConnectionResetError  # closed cleanly
        async with connection(s) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 100_000)
            assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 400 ")
        for header in (b"content-length: " + b"9" * 5000, b"content-length: 1\r\ncontent-length: 2", b"bad header: x"):
            async with connection(s) as (reader, writer):
                writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
                assert (await asyncio.wait_for(reader.readline(), PATIENCE)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.asyncio
async def test_draining_refuses_new_requests_and_finishes_old_ones(llava: Path) -> None:
    async with door(llava) as (s, client, http):
        s.llm.gate.clear()
        running = asyncio.create_task(client.chat.completions.create(model="default", messages=HI))
        await until(lambda: s.llm.running == 1)
        settled = asyncio.create_task(s.service.settled())
        await asyncio.sleep(0)
        for method, path in (("POST", CHAT), ("GET", "/health")):
            reply = await http.request(method, path, json={"messages": HI})
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert not settled.done()
        s.llm.gate.set()
        assert (await running).choices[0].finish_reason == "length"
        await settled


@pytest.mark.asyncio
async def test_what_outlives_the_grace_period_ends_with_an_error(llava: Path) -> None:
    async with door(llava) as (s, client, _):
        s.llm.gate.clear()
        whole = asyncio.create_task(client.chat.completions.create(model="default", messages=HI))
        s.llm.script = script(llava, "hello there")
        body = {"return_token_ids": True}
        stream = await client.chat.completions.create(model="default", messages=HI, stream=True, extra_body=body)
        await anext(aiter(stream))
        await until(lambda: s.llm.running == 2)
        async with connection(s) as (reader, writer):
            writer.write(request_bytes({"messages": HI})[:-1])
            await until(lambda: s.service.http._door._running == 3)  # type: ignore[union-attr]
            await s.service.http.stop()  # type: ignore[union-attr]
            assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await whole
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        await until(lambda: not s.llm.running)


@pytest.mark.asyncio
async def test_methods_and_paths(llava: Path) -> None:
    async with door(llava) as (s, _, http):
        head, get = await http.head("/v1/models"), await http.get("/v1/models", headers={"x-request-id": "mine"})
        assert head.status_code == 200 and not head.content and int(head.headers["content-length"]) == len(get.content)
        assert get.headers["x-request-id"] == "mine" and head.headers["x-request-id"]
        options = await http.options(CHAT, headers={"origin": "http://elsewhere", "access-control-request-method": "POST"})
        assert (options.status_code, options.headers["allow"]) == (200, "POST, OPTIONS")
        assert not any(name.startswith("access-control") for name in options.headers)
        wrong = await http.get(CHAT)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST, OPTIONS")
        for path in ("/v1/chat/completions/", "//v1/models", "/v1/models/", "/v1/embeddings", "/../etc/passwd"):
            assert (await http.get(path)).json()["error"]["code"] in ("not_found", "model_not_found"), path
        body = json.dumps({"messages": HI}).encode()
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
            assert (await http.post(CHAT, content=body, headers=headers)).status_code == 415
        forged = await http.get("/health", headers={"x-request-id": "a" * 200})
        assert len(forged.headers["x-request-id"]) == 32
        async with connection(s) as (reader, writer):  # one connection, several requests, sent at once
            writer.write(
                2 * b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            )
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            assert answer.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.asyncio
async def test_the_other_routes(qwen: Path) -> None:
    async with door(qwen) as (s, client, http):
        [model] = (await client.models.list()).data
        assert (model.id, model.object, model.owned_by) == ("qwen2_vl", "model", "triptych")
        assert model.model_dump()["modalities"] == ["text", "image", "video"] and model.model_dump()["max_model_len"] > 0
        assert (await client.models.retrieve("qwen2_vl")).id == (await client.models.retrieve("default")).id
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")

        url = "data:;base64," + base64.b64encode(picture(280, 140)).decode()
        asked = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], "max_tokens": 100}
        estimate = (await http.post("/v1/estimate", json=asked)).json()
        [item] = estimate["media"]
        assert item == {
            "modality": "image", "tokens": 50, "width": 280, "height": 140, "grid": {"t": 1, "h": 10, "w": 20},
            "field": "messages[0].content[0].image_url.url",
        }  # fmt: skip
        details = estimate["usage"]["prompt_tokens_details"]
        assert details == {"text": estimate["usage"]["prompt_tokens"] - 50, "image": 50, "audio": 0, "video": 0}
        assert estimate["cost"]["encoder_patches"] == 200 and estimate["cost"]["kv_blocks"] > 0 < estimate["max_model_len"]
        assert estimate["cost"]["host_bytes"] == len(picture(280, 140))
        assert not s.llm.requests and not s.encoder.items
        answer = await client.chat.completions.create(model="default", **asked)  # type: ignore[call-overload]
        assert answer.usage.prompt_tokens == estimate["usage"]["prompt_tokens"]

        tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
        counted = (await http.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True})).json()
        encoding = tokenizer.encode("hello there")
        assert (counted["tokens"], counted["token_strs"], counted["count"]) == (encoding.ids, encoding.tokens, len(encoding.ids))
        chat = (await http.post("/tokenize", json={"messages": HI})).json()
        assert chat["count"] == len(chat["tokens"]) and chat["token_strs"] is None
        assert chat["count"] == (await http.post("/v1/estimate", json={"messages": HI})).json()["usage"]["prompt_tokens"]
        for wrong in (
            {}, {"prompt": "x", "messages": HI}, {"prompt": 5}, {"prompt": "x", "text": "y"}, {"prompt": "x", "model": 5},
            {"messages": HI, "add_special_tokens": True},
        ):  # fmt: skip
            assert (await http.post("/tokenize", json=wrong)).status_code == 400
        for shown in ({"prompt": "x"}, {"messages": HI}):
            other = await http.post("/tokenize", json={**shown, "model": "gpt-5"})
            assert (other.status_code, other.json()["error"]["param"]) == (404, "model")

        assert (await http.get("/health")).json() == {"status": "ok"}
        metrics = await http.get("/metrics")
        assert 'triptych_http_answers_total{route="/v1/estimate",status="200"}' in metrics.text
        assert "gpt-5" not in metrics.text


@pytest.mark.asyncio
async def test_health_says_when_nobody_can_answer(llava: Path) -> None:
    async with door(llava) as (s, _, http):
        for llm in s.service.backends.llms.values():
            llm.ready = False
        assert (await http.get("/health")).status_code == 503


@pytest.mark.asyncio
async def test_a_text_longer_than_allowed_is_not_tokenised(llava: Path) -> None:
    async with door(llava, max_text_bytes=1000) as (_, _, http):
        reply = await http.post("/tokenize", json={"prompt": "x" * 1001})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.asyncio
async def test_the_playground_needs_nothing_from_elsewhere(llava: Path) -> None:
    async with door(llava) as (_, _, http):
        page = await http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"(src|href)\s*=\s*[\"']|https?://|@import|innerHTML", page.text)
        assert CHAT in page.text


@pytest.mark.asyncio
async def test_credentials_reach_the_servicer_and_no_log(llava: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with door(llava) as (s, client, _):
        seen: list[dict[str, str]] = []
        original = s.service._servicer.Chat
        s.service._servicer.Chat = lambda request, context: (  # type: ignore[method-assign]
            seen.append(dict(context.invocation_metadata())) or original(request, context)  # type: ignore[func-returns-value]
        )
        secret: Any = [{"role": "user", "content": "a very private question"}]
        await client.chat.completions.create(model="default", messages=secret, extra_headers={"x-request-id": "abc"})
        assert seen == [{"authorization": "Bearer secret-key", "x-request-id": "abc"}]
        ours = [record for record in caplog.records if not record.name.startswith(("openai", "httpx", "httpcore"))]
        assert ours and not any("private" in str(vars(record)) or "secret-key" in str(vars(record)) for record in ours)


@pytest.mark.asyncio
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(llava: Path, tmp_path: Path) -> None:
    async with door(llava) as (s, _, http):
        url = "data:image/png;base64," + base64.b64encode(picture(1100, 1100, "BMP")).decode()
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], "stream": True}
        (tmp_path / "body.json").write_text(json.dumps(body))  # long enough that curl asks before it sends
        command = ["curl", "-sSN", f"{str(http.base_url).rstrip('/')}{CHAT}", "-H", "Content-Type: application/json"]
        process = await asyncio.create_subprocess_exec(*command, "-d", f"@{tmp_path}/body.json", stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0 and events_of(out.decode())[-1] == "[DONE]"
        assert s.encoder.items[0].data == picture(1100, 1100, "BMP")
