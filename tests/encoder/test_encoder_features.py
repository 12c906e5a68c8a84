"""The encoder half against the whole model with its own AutoProcessor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_harness import image_preprocessor
from PIL import Image

from services.encoder.towers import Towers
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from tests.media_files import picture

SIZES = [(64, 64), (57, 201), (300, 31), (1, 1), (2, 150), (640, 480), (333, 333)]
CLOSE = 1e-5


class Whole:
    """The whole model, as a user of transformers would run it."""

    def __init__(self, path: Path) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(path)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, image: Image.Image) -> dict[str, Any]:
        inputs = self.processor(images=[image], text=self.processor.image_token, return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}

    @torch.inference_mode()
    def rows(self, image: Image.Image) -> torch.Tensor:
        (rows,) = self.model.get_image_features(**self.inputs(image), return_dict=True).pooler_output
        return rows


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def pair(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> tuple[Whole, Any, Towers, Any]:
    path = checkpoint_dir(request.param)
    checkpoint = open_checkpoint(str(path))
    return Whole(path), image_preprocessor(checkpoint), Towers(checkpoint, "float32", "cpu"), checkpoint


def test_inputs_are_those_of_the_whole_processor(pair: Any) -> None:
    whole, preprocess, _, _ = pair
    for width, height in SIZES:
        image = picture(width, height)
        expected, prepared = whole.inputs(image), preprocess(image)
        assert set(prepared.inputs) == set(expected)
        assert all(torch.equal(prepared.inputs[name], expected[name]) for name in expected)


def test_rows_alone_and_batched_are_those_of_the_whole_model(pair: Any) -> None:
    whole, preprocess, towers, _ = pair
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    expected = [whole.rows(image) for image in images]
    prepared = [preprocess(image) for image in images]
    batched = towers.encode(prepared)
    for item, (rows,), theirs in zip(prepared, batched, expected, strict=True):
        ((alone,),) = towers.encode([item])
        assert rows.shape == theirs.shape and rows.dtype == torch.float32
        assert (alone - theirs).abs().max() < CLOSE
        assert (rows - alone).abs().max() < CLOSE


def test_rows_and_grid_are_those_that_the_gateway_plans(pair: Any) -> None:
    _, preprocess, towers, checkpoint = pair
    for width, height in SIZES:
        prepared = preprocess(picture(width, height))
        plan = checkpoint.plan_image(width, height)
        ((rows,),) = towers.encode([prepared])
        assert (rows.shape[0], prepared.grid) == (plan.rows, plan.grid)


def test_the_language_model_is_not_there(pair: Any) -> None:
    whole, _, towers, checkpoint = pair
    names = {name for name, _ in towers.model.named_parameters()}
    assert names and not any("language_model" in name or "lm_head" in name or "embed_tokens" in name for name in names)
    towers_of_whole = [getattr(whole.model.base_model, tower) for tower in checkpoint.family.towers]
    assert towers.parameter_bytes == sum(p.nbytes for tower in towers_of_whole for p in tower.parameters())
    assert all(not p.is_meta for p in towers.model.parameters())


def test_the_type_of_the_weights_is_the_type_of_the_rows(checkpoint_dir: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    ((rows,),) = Towers(checkpoint, "bfloat16", "cpu").encode([image_preprocessor(checkpoint)(picture(64, 64))])
    assert rows.dtype is torch.bfloat16 and rows.isfinite().all()
