"""`triptych up` with real processes: fake services that listen, log, drain, hang or crash."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from services.common.config import parse_config
from services.encoder.config import EncoderConfig
from services.gateway.config import GatewayConfig
from services.gateway.profiles import PROFILES
from services.llm.config import LlmConfig
from tests.patience import PATIENCE
from triptych.cli import profiles

REPO = Path(__file__).parents[2]

FAKE_SERVICE = """
import fcntl, json, os, signal, sys, threading
from concurrent import futures
import grpc

def main(name):
    state = os.environ["FAKE_STATE"]
    alive = open(f"{state}/{name}-{os.getpid()}.alive", "w")
    fcntl.flock(alive, fcntl.LOCK_EX)
    with open(f"{state}/argv", "a") as file:
        file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
    if os.environ.get("FAKE_CRASH") == name:
        print(json.dumps({"level": "info", "event": "loading"}), file=sys.stderr)
        print(json.dumps({"level": "error", "event": "no such checkpoint"}), file=sys.stderr)
        sys.exit(3)
    if os.environ.get("FAKE_STUCK") == name:
        print(json.dumps({"level": "info", "event": "stuck"}), file=sys.stderr, flush=True)
        signal.pause()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: os.environ.get("FAKE_HANG") == name or stop.set())
    checks = []
    def check(request, context):
        checks.append(request)
        return b"\\x08\\x01" if len(checks) > 2 else b"\\x08\\x02"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}),))
    port = server.add_insecure_port("127.0.0.1:" + sys.argv[sys.argv.index("--port") + 1])
    server.start()
    if name == "gateway":
        http = {"level": "info", "event": "serving http", "http_address": "127.0.0.1:8123"}
        print(json.dumps(http), file=sys.stderr, flush=True)
    line = {"level": "info", "event": "serving", "address": f"127.0.0.1:{port}"}
    print(json.dumps(line), file=sys.stderr, flush=True)
    stop.wait()
    with open(f"{state}/order", "a") as file:
        file.write(name + "\\n")
"""


@pytest.fixture
def up(tmp_path):
    """Starts `triptych up` beside a fake services package; ends what is left of it afterwards."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fake.py").write_text(textwrap.dedent(FAKE_SERVICE))
    for name in ("encoder", "llm", "gateway"):
        (package / f"{name}.py").write_text(f"from services.fake import main\nmain({name!r})\n")
    started = []

    def start(*flags: str, **env: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "triptych",
            "up",
            "--grpc-port",
            "0",
            "--log-dir",
            str(tmp_path / "logs"),
            *flags,
        ]
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}", "FAKE_STATE": str(tmp_path), **env}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        watchdog = threading.Timer(60, process.kill)
        watchdog.daemon = True
        watchdog.start()
        started.append((process, watchdog))
        return process

    yield start
    for process, watchdog in started:
        watchdog.cancel()
        process.kill()
        process.communicate()


def read_until(stream, text: str) -> str:
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said")


def wait_until_dead(state: Path) -> None:
    """Every fake service holds a lock for as long as it lives."""

    def lock_all() -> None:
        for path in state.glob("*.alive"):
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)

    waiter = threading.Thread(target=lock_all, daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_up_starts_says_ready_and_drains(up, tmp_path):
    flags = ("--model", "some/model", "--dtype", "float32", "--max-model-len", "128", "--encoders", "2", "--http-port", "0")
    process = up(*flags)
    ready = process.stdout.readline()
    host, port, http_host, http_port = re.fullmatch(r"ready grpc=(\S+):(\d+) http=(\S+):(\d+)\n", ready).groups()
    assert (http_host, http_port) == ("127.0.0.1", "8123")
    socket.create_connection((host, int(port)), timeout=5).close()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the services must not see it
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "")
    assert (tmp_path / "order").read_text().split() == ["gateway", "llm", "encoder", "encoder"]
    assert "starting encoder-1 ..." in err and "gateway ready at 127.0.0.1:" in err and "draining" in err
    calls = [json.loads(line) for line in (tmp_path / "argv").read_text().splitlines()]
    assert [name for name, *_ in calls[:-1]].count("encoder") == 2 and calls[-1][0] == "gateway"
    flags = dict(zip(calls[-1][1::2], calls[-1][2::2], strict=True))
    assert flags["--encoder"].count(",") == 1 and flags["--llm"].count(",") == 0
    assert (flags["--model"], flags["--max-model-len"], flags["--port"]) == ("some/model", "128", "0")
    assert flags["--http-port"] == "0"
    llm = next(call for call in calls if call[0] == "llm")
    assert " ".join(llm[1:]) == "--host 127.0.0.1 --port 0 --model some/model --dtype float32 --max-model-len 128"
    assert '"serving"' in (tmp_path / "logs" / "encoder-0.log").read_text()


def test_a_taken_http_port_is_replaced_by_a_free_one(up, tmp_path):
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # then somebody else has it, which is as good
            taken.enter_context(socket.create_server(("127.0.0.1", 8000)))
        up().stdout.readline()
    gateway = json.loads((tmp_path / "argv").read_text().splitlines()[-1])
    assert gateway[gateway.index("--http-port") + 1] == "0"


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port"])
def test_a_port_that_cannot_be_had_is_told_before_anything_starts(up, tmp_path, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            process = up(flag, str(port))
            assert process.communicate(timeout=PATIENCE)[1].splitlines()[-1].endswith(f"choose another {flag}")
            assert process.returncode == 1
    assert not (tmp_path / "argv").exists()


def test_a_log_dir_that_cannot_be_made_is_one_line(up, tmp_path):
    process = up("--log-dir", "/proc/none")
    assert process.communicate(timeout=PATIENCE)[1].startswith("triptych: error: --log-dir: cannot make /proc/none: ")
    assert process.returncode == 1


def test_a_profile_reaches_every_service_as_flags_that_it_knows(up, tmp_path):
    process = up("--profile", "video")
    assert process.stdout.readline().startswith("ready")
    process.terminate()
    process.communicate(timeout=PATIENCE)
    calls = [json.loads(line) for line in (tmp_path / "argv").read_text().splitlines()]
    argv = {name: rest for name, *rest in calls}
    assert argv["gateway"][-2:] == ["--profile", "video"]
    assert parse_config(GatewayConfig, argv["gateway"], {}).max_num_running == 32
    assert parse_config(EncoderConfig, argv["encoder"], {}).max_num_batched_patches == 32768
    llm = parse_config(LlmConfig, argv["llm"], {})
    assert (llm.max_num_batched_tokens, llm.max_num_seqs) == (8192, 16)
    assert set(profiles.ENCODER) == set(profiles.LLM) == set(PROFILES)


def test_sigterm_drains_too_and_verbose_shows_logs(up, tmp_path):
    process = up("--verbose")
    assert process.stdout.readline().startswith("ready grpc=127.0.0.1:")
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert '[llm] {"level": "info", "event": "serving"' in err
    assert (tmp_path / "order").read_text().split() == ["gateway", "llm", "encoder"]


@pytest.mark.parametrize("name", ["encoder", "llm", "gateway"])
def test_a_crash_at_start_is_reported(up, tmp_path, name):
    process = up(FAKE_CRASH=name)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert f'[{name}] {{"level": "error", "event": "no such checkpoint"}}' in err and "loading" not in err
    error = f"triptych: error: {name} exited with code 3 before the stack was ready (log: {tmp_path}/logs/{name}.log)"
    assert err.splitlines()[-1] == error
    wait_until_dead(tmp_path)


def test_a_later_death_stops_the_rest(up, tmp_path):
    process = up()
    process.stdout.readline()
    (alive,) = tmp_path.glob("llm-*.alive")
    os.kill(int(alive.stem.removeprefix("llm-")), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "triptych: error: llm was killed by SIGKILL (log: " in err
    assert (tmp_path / "order").read_text().split() == ["gateway", "encoder"]


def test_a_second_signal_kills(up, tmp_path):
    process = up(FAKE_HANG="gateway")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, "draining")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "gateway was killed by SIGKILL" in err
    wait_until_dead(tmp_path)


def test_interrupted_before_it_is_ready(up, tmp_path):
    process = up("--verbose", FAKE_STUCK="llm")
    read_until(process.stderr, "stuck")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    wait_until_dead(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_services_do_not_outlive_a_killed_up(up, tmp_path):
    process = up()
    process.stdout.readline()
    process.kill()
    wait_until_dead(tmp_path)
    assert len(list(tmp_path.glob("*.alive"))) == 3


def test_without_services_it_says_what_to_install(tmp_path):
    (tmp_path / "triptych").symlink_to(REPO / "triptych")
    command = [
        sys.executable,
        "-c",
        "import sys; sys.modules.update(dict.fromkeys(('services', 'uvloop', 'torch'))); "
        "from triptych.cli import main; sys.exit(main(['up']))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    expected = "triptych: error: not installed: services, uvloop, torch; run pip install 'triptych[all]'\n"
    assert (done.returncode, done.stderr) == (1, expected)
