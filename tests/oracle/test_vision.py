"""The rows of every picture are as many as the processor leaves places for them in the prompt."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from scripts.make_checkpoint import main
from services.models.hf import transformers
from tests.oracle import Item
from tests.oracle.vision import ITEMS
from tests.reference import picture

SIZES = [(420, 300), (97, 303), (900, 460), (28, 28)]


def read(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


class Family:
    """A family's checkpoint, as stock transformers loads it."""

    def __init__(self, name: str, out: Path) -> None:
        if name == "smolvlm":
            pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
        assert main(["--family", name, "--out", str(out), "--layers", "2"]) == 0
        config = transformers.AutoConfig.from_pretrained(out)
        self.name = name
        self.model = getattr(transformers, config.architectures[0]).from_pretrained(out).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(out)
        self.placeholder = getattr(config, "image_token_id", None) or config.vision_config.image_token_id

    def inputs(self, *pictures: Image.Image) -> Any:
        """Processor output for a question after ``pictures``, side by side."""
        parts = [*({"type": "image", "image": image} for image in pictures), {"type": "text", "text": "and this ?"}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            self.processor.tokenizer.chat_template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )

    def items(self, inputs: Any) -> list[Item]:
        return ITEMS[self.name](self.model, inputs)

    def places(self, inputs: Any) -> int:
        return int((inputs["input_ids"] == self.placeholder).sum())


@pytest.fixture(scope="module", params=list(ITEMS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    rng = random.Random(11)
    return [read(picture(rng, width, height, "PNG")) for width, height in SIZES]


def test_rows_fill_the_places(family: Family, pictures: list[Image.Image]) -> None:
    for image in pictures:
        inputs = family.inputs(image)
        items = family.items(inputs)
        assert all(one.rows.shape == (one.grid.w, 64) for one in items)
        if family.name == "mllama":
            (one,) = items
            assert len(one.rows) == one.details["patches"] * one.details["max_tiles"]
            assert one.details["mask"].sum(-1).unique().tolist() == [0, one.details["tiles"]]
            assert family.places(inputs) == 1
        else:
            assert sum(len(one.rows) for one in items) == family.places(inputs)


def test_two_pictures_keep_their_order(family: Family, pictures: list[Image.Image]) -> None:
    """Side by side, in either order, each picture has the same rows; alone it may have more (llava_onevision)."""
    first, second = pictures[:2]
    there, back = family.items(family.inputs(first, second)), family.items(family.inputs(second, first))
    half = len(family.items(family.inputs(first)))
    turned = [*back[-half:], *back[:-half]]
    assert len(there) == len(turned) >= 2
    for one, other in zip(there, turned, strict=True):
        torch.testing.assert_close(one.rows, other.rows, atol=1e-4, rtol=1e-4)
    assert not torch.equal(there[0].rows[:8], there[-1].rows[:8])


def test_text_alone_has_no_items(family: Family) -> None:
    if family.name == "paligemma":
        pytest.skip("its processor requires a picture")
    assert family.items(family.inputs()) == []
