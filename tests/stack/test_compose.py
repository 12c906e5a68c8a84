"""The compose file: valid by docker-compose's own reading, and its very commands answer a question as local processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

import triptych
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("encoder", "llm", "gateway")


def resolved(environment: dict[str, str], *files: str) -> dict[str, Any]:
    """What docker-compose makes of the files."""
    command = ["docker-compose", *(word for f in files for word in ("-f", f)), "config"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    services: dict[str, Any] = yaml.safe_load(result.stdout)["services"]
    return services


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def entrypoint(dockerfile: str) -> list[str]:
    (words,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (ROOT / dockerfile).read_text(), re.MULTILINE)
    return list(yaml.safe_load(words))


pytestmark = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")


def test_the_stack_of_the_compose_file_answers() -> None:
    *ports, http_port = free_ports(4)
    environment = {
        "TRIPTYCH_HOST": "127.0.0.1",
        "TRIPTYCH_HTTP_PORT": str(http_port),
        **{f"TRIPTYCH_{s.upper()}_PORT": str(p) for s, p in zip(SERVICES, ports, strict=True)},
        "TRIPTYCH_ENCODER": f"127.0.0.1:{ports[0]}",
        "TRIPTYCH_LLM": f"127.0.0.1:{ports[1]}",
    }
    services = resolved(environment, "docker-compose.yml")
    assert set(services) == set(SERVICES)
    processes = []
    try:
        for name in SERVICES:
            for needed, how in services[name].get("depends_on", {}).items():
                assert how["condition"] == "service_healthy"
                wait_healthy(healthcheck(services[needed]), processes)
            program, *arguments = entrypoint(services[name]["build"]["dockerfile"])
            assert program == "python"
            command = [sys.executable, *arguments, *services[name]["command"]]
            processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL))
        wait_healthy(healthcheck(services["gateway"]), processes)
        with triptych.Client(f"127.0.0.1:{ports[2]}") as client:
            assert color_of_the_circle(client) == "red"
        with urlopen(f"http://127.0.0.1:{http_port}/health", timeout=10) as health:
            assert health.status == 200
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
    finally:
        for process in processes:
            process.kill()


def color_of_the_circle(client: triptych.Client) -> str:
    """The gateway answers text before it has heard of its encoder."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return client.chat([triptych.image(ROOT / "examples/circle.png"), "What color is the circle?"], max_tokens=8).text
        except triptych.errors.Unavailable:
            assert time.monotonic() < deadline, "no encoder answers"


def healthcheck(service: dict[str, Any]) -> list[str]:
    test = service["healthcheck"]["test"]
    assert test[:2] == ["CMD", "triptych"]
    return [sys.executable, "-m", *test[1:]]


def wait_healthy(check: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 120
    while subprocess.run(check, capture_output=True).returncode:
        assert all(p.poll() is None for p in processes), "a service ended"
        assert time.monotonic() < deadline, f"{check} never succeeded"


def test_the_gpu_file_gives_each_a_device() -> None:
    services = resolved({}, "docker-compose.yml", "docker-compose.gpu.yml")
    devices = {n: services[n]["deploy"]["resources"]["reservations"]["devices"][0] for n in ("encoder", "llm")}
    assert [d["device_ids"] for d in devices.values()] == [["0"], ["1"]]
    assert all(services[n]["environment"]["TRIPTYCH_DEVICE"] == "cuda" for n in devices)
    assert "deploy" not in services["gateway"]


@pytest.mark.parametrize("name", SERVICES)
def test_images_run_as_nobody_special_and_install_their_own_extra(name: str) -> None:
    text = (ROOT / f"deploy/{name}.Dockerfile").read_text()
    assert re.search(r"^USER triptych$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text and "VOLUME /models" in text
    assert f"'.[{name}]'" in text and "-c constraints.txt" in text
    for copied in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / path).exists() for path in copied.split())
