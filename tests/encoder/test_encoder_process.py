"""``python -m services.encoder`` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.models.checkpoint import open_checkpoint
from tests.media_files import file_bytes, picture
from tests.patience import PATIENCE
from triptych.common.v1 import media_pb2
from triptych.encoder.v1 import encoder_pb2, encoder_pb2_grpc

ROOT = Path(__file__).parents[2]
NAME = "triptych.encoder.v1.EncoderService"


def command(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
    return subprocess.Popen(
        [sys.executable, "-m", "services.encoder", *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


@contextmanager
def serving(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it says that it serves."""
    process = command("--model", str(path), "--port", "0", "--device", "cpu")
    try:
        assert process.stderr is not None
        address = next(line["address"] for line in map(json.loads, process.stderr) if line["event"] == "serving")
        yield process, address
    finally:
        process.kill()
        process.wait()


def test_it_answers_and_ends_cleanly(checkpoint_dir: Callable[[str], Path]) -> None:
    path = checkpoint_dir("qwen2_vl")
    plan = open_checkpoint(str(path)).plan_image(120, 80)
    with serving(path) as (process, address), grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        image = media_pb2.MODALITY_IMAGE
        request = encoder_pb2.EncodeRequest(modality=image, data=file_bytes(picture(120, 80)), expected_rows=plan.rows)
        ref = stub.Encode(request).ref_id
        events = list(stub.Fetch(encoder_pb2.FetchRequest(items=[encoder_pb2.FetchItem(ref_id=ref)]), timeout=30))
        assert [event.WhichOneof("event") for event in events] == ["header", "chunk", "done"]
        assert stub.GetLoad(encoder_pb2.GetLoadRequest()).encoded_items == 1
        stub.Release(encoder_pb2.ReleaseRequest(ref_ids=[ref]))
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


def test_a_draining_encoder_still_hands_out_what_it_promised(checkpoint_dir: Callable[[str], Path]) -> None:
    path = checkpoint_dir("qwen2_vl")
    plan = open_checkpoint(str(path)).plan_image(120, 80)
    with serving(path) as (process, address), grpc.insecure_channel(address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        image = media_pb2.MODALITY_IMAGE
        request = encoder_pb2.EncodeRequest(modality=image, data=file_bytes(picture(120, 80)), expected_rows=plan.rows)
        ref = stub.Encode(request).ref_id
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub.Encode(request)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        events = list(stub.Fetch(encoder_pb2.FetchRequest(items=[encoder_pb2.FetchItem(ref_id=ref)]), timeout=30))
        assert events[-1].WhichOneof("event") == "done"
        assert process.poll() is None
        stub.Release(encoder_pb2.ReleaseRequest(ref_ids=[ref]))
        assert process.wait(PATIENCE) == 0


def workers_of(pid: int) -> list[int]:
    """Its decode workers."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found += [int(entry.name)] * (b"services.decoding.worker" in (entry / "cmdline").read_bytes())
    return found


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["--model", "/no/such/folder"], "neither a folder nor a hub id", 1),
        (["--lease-seconds", "0"], "--lease-seconds must be more than 0", 2),
        (["--max-item-bytes", "999999999"], "--max-item-bytes must fit a message", 2),
        (["--decode-workers", "0"], "--decode-workers must be more than 0", 2),
        (["--decode-memory-bytes", "1000"], "--decode-memory-bytes must be at least", 2),
        (["--decode-seconds", "-1"], "--decode-seconds must be more than 0", 2),
        (["--max-audio-seconds", "0"], "--max-audio-seconds must be more than 0", 2),
        (["--max-video-frames", "0"], "--max-video-frames must be more than 0", 2),
        (["--no-such-flag"], "--no-such-flag", 2),
    ],
)
def test_what_cannot_run_ends_with_one_clear_line(arguments: list[str], text: str, code: int) -> None:
    process = command(*arguments)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert text in errors and "Traceback" not in errors
