"""What pictures cost and how prompts spell them, held equal to what the processors make of pictures of every shape.

The processors really run, on tensors without memory: only shapes are computed, so that a huge picture costs no more than a
small one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.image_sizes import UnsupportedSize
from services.models.layout import PromptLayout
from services.models.media import Modality, Picture
from tests.models.processors import FAMILIES, Size, load, prepare, spelled, with_settings

Directory = Callable[[str], Path]
EXTREME = [(1, 1), (1, 2), (200, 1), (1, 200), (1093, 6), (31, 639), (8000, 6000), (40, 8000), (16384, 16384), (3, 100)]


def sizes(seed: str, count: int, largest: int = 8000) -> Iterator[Size]:
    """The extreme ones, then random ones of which none is more than 200 times as long as wide."""
    yield from (size for size in EXTREME if max(size) <= largest * 3)
    dice = random.Random(seed)
    while count:
        width, height = (round(largest ** dice.uniform(0, 1)) for _ in range(2))
        if dice.random() < 0.3:  # edges of tiles, where the branches are
            width, height = (
                max(1, dice.choice([112, 224, 336, 364, 384, 448, 512]) * dice.randint(1, 5) + dice.randint(-1, 1)),
            ) * 2
            height = max(1, round(height * dice.choice([0.5, 1, 1.2, 1.5, 2])))
        if max(width, height) <= 200 * min(width, height):
            count -= 1
            yield width, height


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_equal_what_the_processor_makes_of_blank_pictures(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    token = PromptLayout(checkpoint).tokenizer.fast.id_to_token(checkpoint.placeholder_id(Modality.IMAGE))
    for size in sizes(family, 50):
        inputs, [text] = prepare(processor, [size])
        plan = checkpoint.plan_image(*size)
        assert "".join(part if isinstance(part, str) else token * part for part in plan.spelling) == text, size
        if family == "mllama":
            assert plan.tiles == inputs["num_tiles"][0][0], size
            assert (plan.grid.t, plan.grid.h * plan.grid.w) == (plan.tiles, plan.rows)
            continue
        assert plan.rows == sum(part for part in plan.spelling if isinstance(part, int))
        if "image_grid_thw" in inputs:
            assert [plan.grid.t, plan.grid.h, plan.grid.w] == inputs["image_grid_thw"][0].tolist()
        elif family in ("llava_next", "llava_onevision", "smolvlm", "idefics3"):
            assert plan.tiles == len(inputs["pixel_values"][0]), size
        else:
            assert plan.tiles == len(inputs["pixel_values"]), size


PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("idefics3", {"size": {"longest_edge": 4 * 364}}),
    ("idefics3", {"size": {"longest_edge": 5 * 980}, "max_image_size": {"longest_edge": 980}}),
    ("idefics3", {"do_image_splitting": False}),
    ("smolvlm", {"size": {"longest_edge": 2048}}),
    ("smolvlm", {"size": {"longest_edge": 1535}}),  # an odd side can turn the picture on its way
    ("internvl", {"max_patches": 12}),
    ("internvl", {"min_patches": 2, "max_patches": 9, "size": {"height": 384, "width": 384}}),
    ("gemma3", {"do_pan_and_scan": True}),
    ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 7, "pan_and_scan_min_crop_size": 100}),
    ("gemma4", {"max_soft_tokens": 70}),
    ("gemma4", {"max_soft_tokens": 1120}),
    ("qwen3_vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
]


@pytest.mark.parametrize(("family", "settings"), PUBLISHED)
def test_settings_are_honoured(family: str, settings: dict[str, Any], checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    checkpoint = with_settings(checkpoint, settings)
    for size in sizes(str(settings), 12):
        _, [text] = prepare(processor, [size], **settings)
        assert spelled(checkpoint, checkpoint.plan_image(*size)) == text, size


COUNTED = ["qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "internvl", "gemma4", "paligemma"]


@pytest.mark.parametrize("family", COUNTED)
def test_plans_equal_the_processors_own_count(family: str, checkpoint_dir: Directory) -> None:
    """Only of the processors whose count is what they make: Idefics3's rounds otherwise, and some have none."""
    checkpoint, processor = load(checkpoint_dir(family))
    some = list(sizes(f"count {family}", 2000, largest=20_000))
    counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in some])
    around = 2 if family == "internvl" else 0  # it counts the tokens at both ends
    for size, count in zip(some, counts.num_image_tokens, strict=True):
        assert checkpoint.plan_image(*size).rows + around == count, size


def test_mllama_chooses_the_processors_canvas(checkpoint_dir: Directory) -> None:
    checkpoint, _ = load(checkpoint_dir("mllama"))
    canvas = transformers.models.mllama.image_processing_mllama.get_optimal_tiled_canvas
    for side, most in [(112, 4), (560, 4), (224, 9)]:
        changed = with_settings(checkpoint, {"size": {"height": side, "width": side}, "max_image_tiles": most})
        for width, height in sizes(f"mllama {side}", 700):
            down, across = (int(length) // side for length in canvas(height, width, most, side))
            assert changed.plan_image(width, height).tiles == down * across, (width, height)


def test_several_pictures_of_onevision_are_one_tile_each(checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir("llava_onevision"))
    for some in [[(300, 200), (640, 1000)], [(50, 50)] * 3, [(1, 200), (4000, 300), (130, 7)]]:
        inputs, texts = prepare(processor, some)
        plans = checkpoint.plan([Picture(*size) for size in some])
        assert [spelled(checkpoint, plan) for plan in plans] == texts
        assert [plan.tiles for plan in plans] == [len(tiles) for tiles in inputs["pixel_values"]]
        assert checkpoint.plan_image(*some[0]).rows > plans[0].rows


def test_phi4_plans_equal_what_the_processor_makes_of_blank_pictures(checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir("phi4_multimodal"))
    for size in [*sizes("phi4", 25, largest=1200), (448, 449), (896, 896), (1300, 300)]:
        if max(size) > min(2000, 40 * min(size)):
            continue
        inputs, [text] = prepare(processor, [size], device="cpu", do_rescale=False, do_normalize=False)
        plan = checkpoint.plan_image(*size)
        assert plan.rows == text.count("<|image|>") == inputs["num_img_tokens"][0], size
        assert plan.tiles == len(inputs["image_pixel_values"][0]), size


@pytest.mark.parametrize("most", [4, 36])
def test_phi4_crops_and_masks_equal_the_processors(most: int, checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its resizing left out, so that pictures of any size cost nothing: the mask tells all."""
    checkpoint, processor = load(checkpoint_dir("phi4_multimodal"))
    changed = with_settings(checkpoint, {"dynamic_hd": most})
    module = transformers.models.phi4_multimodal.image_processing_phi4_multimodal
    monkeypatch.setattr(module, "tvF", SimpleNamespace(resize=lambda image, size: image, pad=lambda image, *a, **k: image))
    refused = 0
    for width, height in sizes(f"phi4 {most}", 400):
        blank = torch.zeros((3, 1, 1)).expand(3, height, width)
        try:
            _, mask = processor.image_processor.dynamic_preprocess(blank, 448, 14, 32, max_num=most)
        except ValueError:
            refused += 1
            with pytest.raises(UnsupportedSize, match="must keep 10"):
                changed.plan_image(width, height)
            continue
        kept = mask[::2, ::2]
        plan = changed.plan_image(width, height)
        assert plan.rows == 256 + 1 + int(kept.sum()) + int(kept[:, 0].sum()) + 16, (width, height)
        assert plan.tiles == 1 + mask.numel() // 32**2
    assert refused


@pytest.mark.parametrize("family", [*FAMILIES, "phi4_multimodal"])
def test_strips_are_refused_by_name(family: str, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    with pytest.raises(UnsupportedSize, match="201 x 1 pixels: one side may be at most 200 times") as caught:
        checkpoint.plan([Picture(60, 40), Picture(201, 1)])
    assert caught.value.item == 1


def test_gemma3_crops_where_its_files_say_so(checkpoint_dir: Directory) -> None:
    """Transformers' processor overrides this setting of its own image processor; alone the latter honours it."""
    checkpoint, processor = load(checkpoint_dir("gemma3"))
    processor.image_processor.do_pan_and_scan = True
    _, [ignored] = prepare(processor, [(2000, 600)])
    assert spelled(checkpoint, checkpoint.plan_image(2000, 600)) == ignored
    assert with_settings(checkpoint, {"do_pan_and_scan": True}).plan_image(2000, 600).tiles == 4
