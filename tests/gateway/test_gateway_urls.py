"""Media by URL through the gateway: nothing is fetched unless it is allowed, and what is costs as if it had been sent."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import Stack, ask, refused, stack
from web_fakes import FIELD, GENERIC, INVALID, PNG, page, site

from tests.patience import PATIENCE
from triptych.gateway.v1 import gateway_pb2

Directory = Callable[[str], Path]


def asked(*urls: str) -> gateway_pb2.ChatRequest:
    parts = [gateway_pb2.Part(image=gateway_pb2.Media(url=url)) for url in urls]
    return gateway_pb2.ChatRequest(messages=[gateway_pb2.Message(role=gateway_pb2.ROLE_USER, parts=parts)])


async def both_ways(s: Stack, request: gateway_pb2.ChatRequest) -> tuple[Any, Any]:
    estimate = await s.stub.EstimateTokens(gateway_pb2.EstimateTokensRequest(messages=request.messages))
    request.sampling.max_tokens = 3
    return estimate, [event async for event in s.stub.Chat(request)][-1].done


OFF = [
    *(
        "http://{}/x",
        "http://127.0.0.1:{port}/x",
        "http://2130706433:{port}/",
        "http://[::1]:{port}/",
        "http://[::ffff:7f00:1]:{port}/",
    ),
    *("http://allowed.example\\@127.0.0.1:{port}/x.png", "HTTP://localhost:{port}/", "file:///etc/hostname", "/etc/hostname"),
    "gopher://127.0.0.1:{port}/_INFO",
]


@pytest.mark.asyncio
async def test_nothing_is_fetched_unless_allowed(checkpoint_dir: Directory) -> None:
    """By neither way, and never what text or an SVG names; the listener sees no connection."""
    async with site() as web, stack(checkpoint_dir("qwen2_vl")) as s:
        for url in OFF:
            with refused(INVALID) as errors:
                await both_ways(s, asked(url.format("x", port=web.port)))
            assert errors[0].field == FIELD
        link = web.url("/a.png", "127.0.0.1")
        await both_ways(s, ask(f"what is at {link}? ![picture]({link}) <img src='{link}'>"))
        svg = f"<svg xmlns='http://www.w3.org/2000/svg'><image href='{link}'/></svg>".encode()
        with refused(INVALID, "not a picture"):
            await both_ways(s, ask(svg))
        assert web.connects == 0 and not s.encoder.items


@pytest.mark.asyncio
async def test_an_allowed_url_costs_what_its_bytes_cost(checkpoint_dir: Directory) -> None:
    async with site(a_png=page(PNG)) as web:
        options = {"allowed_media_domains": f"127.0.0.1:{web.port}", "allowed_media_private_networks": "127.0.0.1/32"}
        async with stack(checkpoint_dir("qwen2_vl"), **options) as s:
            estimate, done = await both_ways(s, asked(web.url("/a.png", "127.0.0.1")))
            same, plain = await both_ways(s, ask(PNG))
            assert estimate.cost.encoder_patches > same.cost.encoder_patches == 0  # the encoder has it by now
            estimate.cost.ClearField("encoder_patches")
            assert estimate == same and done.usage.prompt_tokens == plain.usage.prompt_tokens
            assert done.stage_times.fetch > 0 and done.stage_times.probe >= 0 and not plain.stage_times.HasField("fetch")
            assert s.encoder.items[0].data == PNG
            before = web.connects
            with refused(INVALID, GENERIC) as errors:  # one bad URL among good ones ends the request
                await both_ways(s, asked(web.url("/a.png", "127.0.0.1"), web.url("/a.png", "localhost")))
            assert errors[0].field == "messages[0].parts[1].image" and web.connects <= before + 1
            with refused(INVALID, "the limit is 8"):  # counted before any is fetched
                await both_ways(s, asked(*[web.url("/a.png", "127.0.0.1")] * 9))
            await s.idle()


@pytest.mark.asyncio
async def test_a_caller_who_leaves_ends_the_fetch(checkpoint_dir: Directory) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()  # until the other side closes
        left.set()

    async with site(wait=wait) as web:
        options = {"allowed_media_domains": f"127.0.0.1:{web.port}", "allowed_media_private_networks": "127.0.0.1/32"}
        async with stack(checkpoint_dir("qwen2_vl"), **options) as s:
            call = s.stub.Chat(asked(web.url("/wait", "127.0.0.1")))
            await asyncio.wait_for(came.wait(), PATIENCE)
            call.cancel()
            await asyncio.wait_for(left.wait(), PATIENCE)
            await s.idle()


def test_nobody_else_in_the_gateway_opens_connections() -> None:
    """But for gRPC channels."""
    clients = {"httpcore2", "httpx2", "httpx", "requests", "aiohttp", "urllib3", "urllib.request", "http.client"}
    folder = Path(__file__).resolve().parents[2] / "services"
    users = set()
    for file in [*(folder / "gateway").rglob("*.py"), *(folder / "models").rglob("*.py"), *(folder / "decoding").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {file.name for name in names if name in clients}
    assert users == {"url_fetch.py"}
