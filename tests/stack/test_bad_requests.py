"""What a user gets wrong: a one-line error that names the field and the limit, exit code 2, and the stack goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.reference import asks
from tests.stack.conftest import RunningStack


def cli(stack: RunningStack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych", *words, "--address", stack.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def jpeg() -> bytes:
    return next(p for ask in asks(4, 12, True) for p in ask.turns[-1][1] if isinstance(p, bytes) and p[:2] == b"\xff\xd8")


BAD: dict[str, tuple[Callable[[bytes], bytes | None], list[str]]] = {
    "text.jpg": (lambda jpeg: b"this is no picture", ["image", "JPEG"]),
    "empty.jpg": (lambda jpeg: b"", ["empty"]),
    "truncated.jpg": (lambda jpeg: jpeg[: len(jpeg) // 2], ["messages[0].parts[0].image", "truncated"]),
    "missing.jpg": (lambda jpeg: None, ["missing.jpg"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, start_stack: Callable[[str], RunningStack], tmp_path: Path, jpeg: bytes) -> None:
    stack = start_stack("qwen2_vl")
    make, expected = BAD[name]
    content = make(jpeg)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = cli(stack, "ask", "what is this?", "--image", str(tmp_path / name))
    check_refused(result, expected)
    check_serving(stack)


def test_unknown_model(start_stack: Callable[[str], RunningStack]) -> None:
    stack = start_stack("qwen2_vl")
    check_refused(cli(stack, "ask", "hello", "--model", "gpt-17"), ["model", "gpt-17", "qwen2_vl"])
    check_serving(stack)


def test_ten_thousand_tokens_too_many(start_stack: Callable[[str], RunningStack]) -> None:
    stack = start_stack("qwen2_vl")
    limit = stack.loads().llm.max_model_len
    result = cli(stack, "ask", "a " * (limit + 10_000), "--max-tokens", "4")
    check_refused(result, ["messages", str(limit)])
    check_serving(stack)


@pytest.mark.parametrize(
    ("flags", "expected"), [(["--temperature", "3"], ["temperature", "2"]), (["--max-tokens", "0"], ["max_tokens", "1"])]
)
def test_sampling_out_of_range(start_stack: Callable[[str], RunningStack], flags: list[str], expected: list[str]) -> None:
    check_refused(cli(start_stack("qwen2_vl"), "ask", "hello", *flags), [])
    result = cli(start_stack("qwen2_vl"), "ask", "hello", *flags)
    assert all(word in result.stderr.replace("-", "_") for word in expected), result.stderr


def check_refused(result: subprocess.CompletedProcess[str], expected: list[str]) -> None:
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("triptych: error: ")
    assert all(word in line for word in expected), line
    assert result.stdout == ""


def check_serving(stack: RunningStack) -> None:
    result = cli(stack, "ask", "hello", "--max-tokens", "1")
    assert result.returncode == 0, result.stderr
    stack.wait_until(lambda loads: not loads.busy())
