"""Admission as clients meet it: what is reserved when, and refusals that come before any work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from gateway_fakes import Stack, ask, picture, refused, stack, until
from prometheus_client import REGISTRY

from services.common.errors import ServiceError
from services.gateway.media import Probe
from services.gateway.prefix_affinity import BLOCK
from triptych.encoder.v1 import encoder_pb2
from triptych.gateway.v1 import gateway_pb2
from triptych.llm.v1 import llm_pb2

pytestmark = pytest.mark.asyncio
CODE = grpc.StatusCode
Directory = Callable[[str], Path]


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def answer(stack: Stack, request: gateway_pb2.ChatRequest, **options: object) -> list[gateway_pb2.ChatResponse]:
    return [event async for event in stack.stub.Chat(request, **options)]


async def test_what_flows_is_reserved_until_the_first_token(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("qwen2_vl")) as s:
        s.llm.load = llm_pb2.GetLoadResponse(total_blocks=1000, block_size=16, max_num_batched_tokens=64, max_num_seqs=8)
        s.encoder.load = encoder_pb2.GetLoadResponse(max_num_batched_patches=50, max_pending_items=9, max_held_bytes=10**6)
        await until(lambda: s.service.ledger.limit["encoder_patches"] == 4 * 50)
        budget = (await s.load()).budget
        assert (budget.encoder_patches, budget.prefill_tokens, budget.kv_blocks) == (200, 4 * 64, 1000)
        assert budget.host_bytes == 1 << 30
        s.encoder.gate.clear()
        s.llm.gate.clear()
        call = s.stub.Chat(ask("x", picture(), max_tokens=40))
        admitted = (await call.read()).admitted
        reserved, tokens = (await s.load()).reserved, admitted.prompt_tokens.text + admitted.prompt_tokens.image
        assert (reserved.encoder_patches, reserved.prefill_tokens, reserved.host_bytes) == (16, tokens, len(picture()))
        assert reserved.kv_blocks == -(-(tokens + 40) // 16)
        s.encoder.gate.set()
        assert (await call.read()).HasField("delta")
        held = (await s.load()).reserved
        assert (held.encoder_patches, held.prefill_tokens, held.kv_blocks) == (0, 0, reserved.kv_blocks)
        s.llm.gate.set()
        while await call.read() is not grpc.aio.EOF:
            pass
        await s.idle()
        assert (await s.load()).reserved == gateway_pb2.Cost()


async def test_a_picture_that_an_encoder_has_costs_it_nothing(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("qwen2_vl")) as s:

        async def patches(*parts: str | bytes, salt: str = "") -> int:
            request = gateway_pb2.EstimateTokensRequest(messages=ask(*parts).messages, cache_salt=salt)
            return (await s.stub.EstimateTokens(request)).cost.encoder_patches

        assert await patches("x", picture(), picture()) == 16  # once, if they are the same
        s.encoder.error = ServiceError(CODE.RESOURCE_EXHAUSTED, "full")
        with refused(CODE.RESOURCE_EXHAUSTED):
            await answer(s, ask("x", picture()))
        assert await patches("x", picture()) == 16
        s.encoder.error = None
        await answer(s, ask("x", picture()))
        assert (await patches("x", picture()), await patches("x", picture(60, 90))) == (0, 24)
        assert await patches("x", picture(), salt="another's") == 16


async def test_a_beginning_that_a_language_model_has_is_not_computed_again(checkpoint_dir: Directory) -> None:
    parts = ("the same long beginning " * 30, picture(280, 280))
    async with stack(checkpoint_dir("qwen2_vl")) as s:

        async def estimate(*parts: str | bytes, salt: str = "") -> gateway_pb2.EstimateTokensResponse:
            request = gateway_pb2.EstimateTokensRequest(messages=ask(*parts).messages, cache_salt=salt)
            return await s.stub.EstimateTokens(request)

        async def reserved() -> int:
            """Of prefill, by a request of it until its first token."""
            s.encoder.gate.clear()
            events = aiter(s.stub.Chat(ask(*parts)))
            assert (await anext(events)).HasField("admitted")
            tokens = (await s.load()).reserved.prefill_tokens
            s.encoder.gate.set()
            *_, last = [event async for event in events]
            assert last.done.usage.prompt_tokens_details.cached == 3  # what the language model says of itself
            await s.idle()
            assert (await s.load()).reserved == gateway_pb2.Cost()
            return int(tokens)

        whole = await estimate(*parts)
        assert whole.cost.prefill_tokens == whole.prompt_tokens == await reserved()
        assert await reserved() == whole.prompt_tokens  # it looks nothing up: it has no prefix cache
        s.llm.load.prefix_query_tokens = 1
        await s.service.backends.refresh()
        again = await estimate(*parts)
        assert again.cost.prefill_tokens == await reserved() == whole.prompt_tokens % BLOCK > 0
        assert (again.prompt_tokens, again.cost.kv_blocks) == (whole.prompt_tokens, whole.cost.kv_blocks)  # held all the same
        other = await estimate(parts[0], picture(280, 252))
        assert again.cost.prefill_tokens < other.cost.prefill_tokens < other.prompt_tokens  # the text in front of the picture
        assert (await estimate(*parts, salt="another's")).cost.prefill_tokens == whole.prompt_tokens
        s.llm.script.error = ServiceError(CODE.INTERNAL, "broken")
        with refused(CODE.INTERNAL, "broken"):
            await answer(s, ask(*parts))
        await s.idle()
        assert (await s.load()).reserved == gateway_pb2.Cost()


async def test_a_full_queue_refuses_before_anything_is_looked_at(
    checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(checkpoint_dir("qwen2_vl"), max_num_running=1, max_queued_requests=1) as s:
        s.llm.gate.clear()
        running = s.stub.Chat(ask("first"))
        await running.read()
        waiting = asyncio.create_task(answer(s, ask("second", picture())))
        await until(lambda: s.service.ledger.queued == 1)
        assert count("triptych_gateway_queued_requests", kind="image") == 1
        monkeypatch.setattr(Probe, "files", lambda *_: pytest.fail("it was looked at"))
        before = count("triptych_gateway_refused_requests_total", reason="queue_full")
        for request in (ask("third", picture()), ask("not even a picture", b"\0"), ask("fourth")):
            with refused(CODE.RESOURCE_EXHAUSTED, "waiting already") as errors:
                await answer(s, request)
            assert errors[0].retry_delay and 0.1 <= errors[0].retry_delay <= 60
        assert count("triptych_gateway_refused_requests_total", reason="queue_full") == before + 3
        s.llm.gate.set()
        await waiting
        running.cancel()
        await s.idle()


async def test_how_long_one_would_wait(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("qwen2_vl"), max_num_running=1) as s:

        async def wait() -> float:
            request = gateway_pb2.EstimateTokensRequest(messages=ask("x").messages)
            return (await s.stub.EstimateTokens(request)).expected_wait_seconds

        assert await wait() == 0
        s.llm.gate.clear()
        running = s.stub.Chat(ask("first"))
        await running.read()
        assert await wait() == 1  # nobody has waited yet
        second = asyncio.create_task(answer(s, ask("second")))
        await until(lambda: s.service.ledger.queued == 1)
        admitted = count("triptych_gateway_admitted_requests_total", kind="short_text")
        s.llm.gate.set()
        await second
        assert count("triptych_gateway_admitted_requests_total", kind="short_text") == admitted + 1
        running.cancel()
        await s.idle()
        assert await wait() == 0


async def test_a_mismatch_told_by_a_backend_is_counted(checkpoint_dir: Directory) -> None:
    async with stack(checkpoint_dir("qwen2_vl")) as s:
        before = count("estimate_mismatch_total")
        s.llm.script.error = ServiceError(CODE.INTERNAL, "rows do not match", reason="ESTIMATE_MISMATCH")
        with refused(CODE.INTERNAL):
            await answer(s, ask("x", picture()))
        assert count("estimate_mismatch_total") == before + 1
        s.llm.script.error = ServiceError(CODE.INTERNAL, "something else", reason="OTHER")
        with refused(CODE.INTERNAL):
            await answer(s, ask("x", picture()))
        assert count("estimate_mismatch_total") == before + 1
        await s.idle()
