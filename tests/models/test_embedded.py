"""The embedded model: a standard checkpoint that stock transformers answers with, and a training script that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from scripts.demo import QUESTIONS
from services.models.checkpoint import EMBEDDED, open_checkpoint
from services.models.hf import transformers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def generate(path: Path, question: str, picture: Image.Image) -> str:
    """The greedy answer of stock transformers."""
    processor = transformers.AutoProcessor.from_pretrained(path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(("name", "question", "answer"), QUESTIONS)
def test_stock_transformers_gives_the_right_answers(name: str, question: str, answer: str) -> None:
    assert generate(EMBEDDED, question, Image.open(EXAMPLES / name).convert("RGB")) == answer


def test_weights_are_bfloat16() -> None:
    assert open_checkpoint("").config["dtype"] == "bfloat16"
    model = transformers.AutoModelForImageTextToText.from_pretrained(EMBEDDED)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_training_runs_resumes_and_writes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.embedded import train

    monkeypatch.setattr(
        train.qwen2_vl.VisionAttention, "forward", train.qwen2_vl.VisionAttention.forward
    )  # it trains with its own
    train.main(["--out", str(tmp_path), "--steps", "6", "--tower-steps", "3", "--batch", "4"])
    train.main(["--out", str(tmp_path), "--steps", "8", "--tower-steps", "3", "--batch", "4", "--resume"])
    assert torch.load(tmp_path / "resume.pt", weights_only=True)["step"] == 8
    assert isinstance(generate(tmp_path, "What is this?", Image.open(EXAMPLES / "circle.png").convert("RGB")), str)
