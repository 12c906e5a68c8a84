"""The gateway as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import FakeEncoder, FakeLlm, ask, picture, served_encoder, served_llm, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import PATIENCE
from triptych.gateway.v1 import gateway_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
Directory = Callable[[str], Path]


def test_torch_is_never_imported() -> None:
    code = "import services.gateway.service, services.gateway.__main__, sys; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--llm is required"),
        (["--llm", "nowhere"], "--llm must be host:port"),
        (["--llm", "h:1", "--modell", "x"], "unrecognized arguments"),
        (["--llm", "h:1", "--model", "/no/such/folder"], "neither a folder nor a hub id"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], text: str) -> None:
    result = subprocess.run([sys.executable, "-m", "services.gateway", *flags], cwd=ROOT, capture_output=True, text=True)
    [line] = result.stderr.splitlines()
    assert result.returncode != 0 and text in line


@pytest.mark.asyncio
async def test_serves_and_stops(checkpoint_dir: Directory) -> None:
    secret = "a very private question"
    encoder, llm = FakeEncoder(), FakeLlm()
    async with served_encoder(encoder) as encoder_address, served_llm(llm) as llm_address:
        flags = ["--port", "0", "--model", str(checkpoint_dir("qwen2_vl")), "--encoder", encoder_address, "--llm", llm_address]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", *flags, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        said: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PATIENCE):
                while not {"serving", "ready", "encoder ready"} <= said.keys():
                    line = json.loads(await process.stderr.readline())
                    said[line["event"]] = line
            async with grpc.aio.insecure_channel(said["serving"]["address"]) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                for service in ("", "triptych.gateway.v1.ChatService"):
                    reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
                    assert reply.status == health_pb2.HealthCheckResponse.SERVING
                chat = gateway_pb2_grpc.ChatServiceStub(channel)
                events = [event async for event in chat.Chat(ask(secret, picture()))]
                assert events[0].HasField("admitted") and events[-1].HasField("done")
                await until(lambda: not encoder.refs)
                # SIGTERM lets what runs finish
                llm.gate.clear()
                call = chat.Chat(ask("slow"))
                await call.read()
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
                llm.gate.set()
                while (event := await call.read()) is not grpc.aio.EOF:
                    final = event
                assert final.HasField("done")
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
            logs = (await process.stderr.read()).decode()
            assert secret not in logs and '"event": "stopped"' in logs
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
