"""The README's blocks run as they stand, against a stack on the address they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from scripts.local_stack import LocalStack, local_stack
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language; "" for those without."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [body for name, body in fenced if name == language]


def environment() -> dict[str, str]:
    """This environment's commands first, as after `source .venv/bin/activate`."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack("--grpc-port", "50050", "--http-port", "8000", quiet=True) as stack:
        assert (stack.address, stack.http_address) == ("127.0.0.1:50050", "127.0.0.1:8000")
        yield stack


@pytest.mark.parametrize("block", blocks("python"))
def test_python(block: str, stack: LocalStack) -> None:
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_shell(command: str, stack: LocalStack) -> None:
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", [line for block in blocks("grpcurl") for line in block.splitlines()])
def test_grpcurl(command: str, stack: LocalStack) -> None:
    """grpcurl itself where it is installed; else what it does: reflection, then a call with JSON in and out."""
    if shutil.which("grpcurl"):
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE)
        assert result.returncode == 0, result.stderr
        output = result.stdout
    else:
        output = call_by_reflection(shlex.split(command))
    expected = {"ListModels": "qwen2_vl", "Chat": "finishReason", "Check": "SERVING"}[command.rpartition("/")[2]]
    assert expected in output


def call_by_reflection(words: list[str]) -> str:
    data = json.loads(words[words.index("-d") + 1]) if "-d" in words else {}
    address, method = words[-2:]
    service, _, name = method.partition("/")
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        described = pool.FindServiceByName(service).methods_by_name[name]
        request, response = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        call = channel.unary_stream(f"/{method}", request.SerializeToString, response.FromString)
        message = json_format.ParseDict(data, request())
        return "\n".join(json_format.MessageToJson(r) for r in call(message, timeout=30))


def test_console_blocks_name_real_commands() -> None:
    """What the README shows but a test cannot wait for: at least the flags and targets exist."""
    makefile = (ROOT / "Makefile").read_text()
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
            continue
        if words[0] == "docker-compose":
            assert all((ROOT / words[i + 1]).exists() for i, w in enumerate(words) if w == "-f")
            continue
        if words[0] == "source":
            assert words[1:] == [".venv/bin/activate"]
            continue
        position = 3 if words[0] == "python" else 2
        shown = subprocess.run([*words[:position], "--help"], capture_output=True, text=True, cwd=ROOT, env=environment()).stdout
        assert all(flag in shown for flag in words[position:] if flag.startswith("--")), line


def test_the_tree_names_what_exists() -> None:
    (tree,) = blocks("")
    parents: list[str] = []
    for line in tree.splitlines():
        match = re.match(r"^( *)(\S+/)(\s|$)", line)
        if match:
            parents = [*parents[: len(match[1]) // 2], match[2]]
            assert (ROOT / "".join(parents)).is_dir(), line
