"""Recordings and videos from the command line: an answer, an estimate that it keeps, and errors that teach."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.media_files import DATA
from tests.patience import PATIENCE
from tests.stack.conftest import RunningStack

MEDIA = DATA / "media"


@pytest.fixture
def stack(start_stack: Callable[[str], RunningStack]) -> RunningStack:
    return start_stack("qwen2_5_omni_thinker")


def cli(stack: RunningStack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych", *words, "--address", stack.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_an_answer_costs_what_was_estimated(stack: RunningStack) -> None:
    media = ["--audio", str(MEDIA / "speech.opus"), "--video", str(MEDIA / "band_turned.mov")]
    estimated = cli(stack, "estimate", "what is this?", *media, "--json")
    assert estimated.returncode == 0, estimated.stderr
    report = json.loads(estimated.stdout)
    audio, video = report["media"]
    assert (audio["modality"], audio["width"], video["modality"]) == ("audio", None, "video")
    assert (video["width"], video["height"], video["field"]) == (104, 176, "messages[0].parts[1].video")
    details = report["usage"]["prompt_tokens_details"]
    assert (details["audio"], details["video"], details["image"]) == (audio["tokens"], video["tokens"], 0)
    asked = cli(stack, "ask", "what is this?", *media, "--max-tokens", "4")
    assert asked.returncode == 0, asked.stderr
    prompt = report["usage"]["prompt_tokens"]
    assert f"prompt {prompt} tokens ({details['text']} text, {audio['tokens']} audio, {video['tokens']} video" in asked.stderr
    shown = cli(stack, "estimate", *media)
    assert re.search(rf"video\s+104x176 pixels\s+grid [\dx]+\s+{video['tokens']} tokens", shown.stdout), shown.stdout


@pytest.mark.parametrize(
    ("modality", "content", "expected"),
    [
        ("audio", b"no sound at all", ["messages[0].parts[0].audio", "WAV, MP3"]),
        ("video", b"no video at all", ["messages[0].parts[0].video", "MP4, MOV"]),
        ("video", (DATA / "cases" / "sound_only.mp4").read_bytes(), ["messages[0].parts[0].video", "no moving picture"]),
        ("audio", (DATA / "cases" / "cfr25.mp4").read_bytes(), ["messages[0].parts[0].audio", "no sound"]),
    ],
)
def test_bad_files(stack: RunningStack, tmp_path: Path, modality: str, content: bytes, expected: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    result = cli(stack, "ask", "what is this?", f"--{modality}", str(file))
    assert result.returncode == 2 and not result.stdout and "Traceback" not in result.stderr
    assert all(word in result.stderr for word in expected), result.stderr
    assert cli(stack, "ask", "hello", "--max-tokens", "1").returncode == 0
