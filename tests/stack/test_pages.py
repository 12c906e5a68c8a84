"""Pages through a real stack on the embedded model: each is answered as if it had been asked alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych
from scripts.local_stack import local_stack
from tests.patience import PATIENCE
from tests.sdk.pdf_files import pdf_file
from tests.stack.conftest import RunningStack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION = "What color is the background?"
COLORS = [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    logs = tmp_path_factory.mktemp("logs")
    with local_stack(quiet=True, log_dir=logs) as stack:
        yield RunningStack(stack, logs)


def test_pages_are_answered_as_if_each_was_asked_alone(stack: RunningStack) -> None:
    pictures = [triptych.image(path) for path in sorted(EXAMPLES.glob("*.png"))]
    pages = [*pictures, *triptych.pdf(pdf_file(COLORS, size=(144, 144)))]
    with triptych.Client(stack.address) as client:
        alone = [client.chat([page, QUESTION]) for page in pages]
        pages.insert(2, triptych.image(b"no picture"))
        answers: list[triptych.ChatResult | None] = []
        with client.pages(QUESTION, iter(pages), request_id="doc") as stream:
            for answer in stream:
                try:
                    answers.append(answer.read())
                except triptych.errors.InvalidArgument as error:
                    assert error.violations[0][0] == "page.parts[0].image" and error.request_id == "doc.2"
                    answers.append(None)
        assert [a and a.token_ids for a in answers] == [
            *(a.token_ids for a in alone[:2]),
            None,
            *(a.token_ids for a in alone[2:]),
        ]
        assert [a.media for a in answers if a] == [
            tuple(triptych.MediaEstimate(**{**vars(item), "field": "page.parts[0].image"}) for item in a.media) for a in alone
        ]
    finished = [e for e in stack.events("gateway") if e["event"] == "admitted" and e["request_id"].startswith("doc.")]
    assert [e["request_id"] for e in finished] == ["doc.0", "doc.1", "doc.3", "doc.4", "doc.5"]
    stack.wait_until(lambda loads: not loads.busy())


def test_earlier_answers_reach_the_model(stack: RunningStack) -> None:
    picture = triptych.image(EXAMPLES / "circle.png")
    with triptych.Client(stack.address) as client, client.pages(QUESTION, [picture] * 4, remember=2, max_tokens=8) as stream:
        answers = [answer.read() for answer in stream]
    texts = [answer.prompt_tokens.text for answer in answers]
    assert texts[0] < texts[1] < texts[2]
    assert {answer.prompt_tokens.image for answer in answers} == {answers[0].prompt_tokens.image}


def test_leaving_a_document_frees_everything(stack: RunningStack) -> None:
    picture = triptych.image(EXAMPLES / "circle.png")
    with triptych.Client(stack.address) as client:
        with client.pages(QUESTION, (picture for _ in range(1000)), max_tokens=3000, min_tokens=3000) as stream:
            answer = next(stream)
            next(answer)
            assert stack.loads().gateway.running_requests >= 1
        stack.wait_until(lambda loads: not loads.busy())


def test_the_command_asks_of_a_pdf(stack: RunningStack, tmp_path: Path) -> None:
    path = tmp_path / "colors.pdf"
    path.write_bytes(pdf_file(COLORS, size=(144, 144)))
    command = [sys.executable, "-m", "triptych", "ask", QUESTION, "--pages", str(path), "--address", stack.address]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert asked.returncode == 0, asked.stderr
    lines = asked.stdout.splitlines()
    assert lines[::2] == [f"== {path}, page 1 (1 of 2)", f"== {path}, page 2 (2 of 2)"] and all(lines[1::2])
    assert asked.stderr.count(" image") == 2
