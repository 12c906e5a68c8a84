"""A killed client frees everything within a second; a drained stack finishes what it began."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import triptych
from scripts.local_stack import local_stack
from tests.reference import asks
from tests.stack.conftest import RunningStack

CLIENT = """
import sys, triptych
with triptych.Client(sys.argv[1]) as client:
    with client.stream([triptych.image(sys.argv[2]), "what is this?"], max_tokens=30000, min_tokens=30000) as stream:
        for delta in stream:
            print("streaming", flush=True)
"""


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "picture.jpg"
    path.write_bytes(next(p for ask in asks(4, 8, True) for p in ask.turns[-1][1] if isinstance(p, bytes)))
    return path


def seconds_to_free(stack: RunningStack, picture: Path) -> float:
    """Kill three clients in the middle of their answers: how long until the services hold what they held before."""
    before = stack.wait_until(lambda loads: not loads.busy())
    command = [sys.executable, "-c", CLIENT, stack.address, str(picture)]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for client in clients:
        assert client.stdout is not None and client.stdout.readline() == "streaming\n"
    during = stack.loads()
    assert during.llm.running_sequences == 3 and during.gateway.running_requests == 3
    start = time.monotonic()
    for client in clients:
        client.kill()
    stack.wait_until(lambda loads: not loads.busy() and loads.tasks() <= before.tasks())
    took = time.monotonic() - start
    for client in clients:
        client.wait()
        assert client.stdout is not None
        client.stdout.close()
    return took


def test_killing_clients_frees_everything(start_stack: Callable[[str], RunningStack], picture: Path) -> None:
    stack = start_stack("qwen2_vl")
    with triptych.Client(stack.address) as client:  # connections between the services exist from here on
        client.chat([triptych.image(picture), "hello"], max_tokens=2)
    assert any(seconds_to_free(stack, picture) <= 1 for _ in range(3)), "once at least, if the machine stands still at times"


@pytest.mark.asyncio
async def test_sigterm_lets_eight_streams_finish(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with local_stack("--model", str(checkpoint_dir("qwen2_vl")), quiet=True, log_dir=logs) as stack:
        running = RunningStack(stack, logs)
        async with triptych.AsyncClient(stack.address) as client:
            begun = [asyncio.Event() for _ in range(8)]

            async def ask(index: int) -> triptych.ChatResult:
                async with client.stream(f"tell me a story {index}", max_tokens=300, min_tokens=300) as stream:
                    async for _ in stream:
                        begun[index].set()
                return stream.result

            tasks = [asyncio.create_task(ask(i)) for i in range(8)]
            await asyncio.gather(*(event.wait() for event in begun))
            stack.process.send_signal(signal.SIGTERM)
            results = await asyncio.gather(*tasks)
        assert [r.usage.completion_tokens for r in results] == [300] * 8
        assert await asyncio.to_thread(stack.process.wait, 60) == 0
        for service in ("gateway", "encoder", "llm"):
            assert running.events(service)[-1]["event"] == "stopped"


@pytest.mark.asyncio
async def test_a_draining_gateway_refuses_new_requests(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with local_stack("--model", str(checkpoint_dir("qwen2")), quiet=True, log_dir=tmp_path / "logs") as stack:
        async with triptych.AsyncClient(stack.address, timeout=120) as client:
            async with client.stream("hello", max_tokens=2000, min_tokens=2000) as stream:
                await anext(aiter(stream))
                stack.process.send_signal(signal.SIGTERM)
                with pytest.raises(triptych.errors.Unavailable):
                    while True:
                        await client.chat("hello", max_tokens=1)
                async for _ in stream:
                    pass
            assert stream.result.usage.completion_tokens == 2000
        assert await asyncio.to_thread(stack.process.wait, 60) == 0


def test_the_language_model_stands_back(start_stack: Callable[[str], RunningStack]) -> None:
    stack = start_stack("qwen2_vl")
    nice = {
        service: {
            int((thread / "stat").read_text().rsplit(")", 1)[1].split()[16])
            for thread in Path(f"/proc/{stack.serving(service)['pid']}/task").iterdir()
        }
        for service in ("gateway", "encoder", "llm")
    }
    assert nice == {"gateway": {0}, "encoder": {0}, "llm": {5}}
