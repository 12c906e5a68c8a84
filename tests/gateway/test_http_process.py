"""The HTTP door of a gateway that is a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from gateway_fakes import FakeLlm, served_llm, until

ROOT = Path(__file__).resolve().parents[2]
Directory = Callable[[str], Path]


@pytest.mark.asyncio
async def test_sigterm_lets_a_stream_finish_and_refuses_new_requests(checkpoint_dir: Directory) -> None:
    llm = FakeLlm()
    async with served_llm(llm) as address, asyncio.timeout(60):
        flags = ["--port", "0", "--http-port", "0", "--model", str(checkpoint_dir("qwen2")), "--llm", address]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", *flags, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        try:
            while "http_address" not in (line := json.loads(await process.stderr.readline())):
                pass
            async with httpx2.AsyncClient(base_url=f"http://{line['http_address']}", timeout=30) as client:
                llm.gate.clear()
                body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "return_token_ids": True}
                async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    pieces = reply.aiter_text()
                    text = await anext(pieces)
                    process.send_signal(signal.SIGTERM)
                    while json.loads(await process.stderr.readline())["event"] != "draining":
                        pass
                    assert (await client.get("/health")).status_code == 503
                    assert (await client.post("/v1/chat/completions", json=body)).status_code == 503
                    llm.gate.set()
                    text += "".join([piece async for piece in pieces])
            assert text.endswith("data: [DONE]\n\n")
            assert await process.wait() == 0
            await until(lambda: not llm.running)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_taken_port_is_one_line(checkpoint_dir: Directory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--port", "0", "--http-port", port, "--model", str(checkpoint_dir("qwen2")), "--llm", "127.0.0.1:1"]
        result = subprocess.run([sys.executable, "-m", "services.gateway", *flags], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr and "choose another --http-port" in result.stderr
