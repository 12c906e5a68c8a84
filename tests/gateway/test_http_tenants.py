"""API keys over HTTP: every route that shows or does anything asks for one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx2
import openai
import pytest
from gateway_fakes import stack, until

HI = [{"role": "user", "content": "hi"}]
OPEN = {"/", "/health"}  # a page that holds nothing, and a probe's question


@pytest.mark.asyncio
async def test_every_route_asks_for_a_key(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a:{hashlib.sha256(b'key-a').hexdigest()}:1\n")
    async with stack(checkpoint_dir("llava"), http_port=0, api_keys=str(keys)) as s:
        base = f"http://{s.service.http.address}"
        async with httpx2.AsyncClient(base_url=base, timeout=20) as http:
            for path, route in s.service.http._door._routes.items():
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-a"}):
                    body = {"json": {"messages": HI}} if route.method == "POST" else {}
                    reply = await http.request(route.method, path.replace("*", "x"), headers=headers, **body)
                    if path in OPEN:
                        assert reply.status_code == 200
                        continue
                    assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer", path
                    assert reply.json()["error"]["type"] == "authentication_error"
            assert not s.llm.requests
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="key-a", max_retries=0, timeout=20) as client:
                assert (await client.models.list()).data
                s.llm.gate.clear()
                running = await client.chat.completions.create(
                    model="default", messages=HI, stream=True, extra_body={"return_token_ids": True}
                )
                await until(lambda: s.llm.running == 1)
                with pytest.raises(openai.RateLimitError):  # its one place is taken
                    await client.chat.completions.create(model="default", messages=HI)
                s.llm.gate.set()
                async for _ in running:
                    pass
