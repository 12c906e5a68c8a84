"""The arithmetic of picture sizes, held equal to transformers' own."""

from __future__ import annotations

import random

import pytest

from services.models import image_sizes
from services.models.hf import transformers
from services.models.media import Grid

CONFIG = {"vision_config": {"image_size": 336, "patch_size": 14}}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}


def test_qwen_equals_smart_resize_on_random_sizes() -> None:
    smart_resize = transformers.models.qwen2_vl.image_processing_qwen2_vl.smart_resize
    sizes = random.Random(7)
    for _ in range(10_000):
        width, height = (round(2 ** sizes.uniform(0, 13)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ValueError, match="aspect ratio"):
                smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
            with pytest.raises(image_sizes.UnsupportedSize, match="200"):
                image_sizes.qwen_smart_resize(width, height, {}, PROCESSOR)
            continue
        h, w = smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
        plan = image_sizes.qwen_smart_resize(width, height, {}, PROCESSOR)
        assert plan.grid == Grid(1, h // 14, w // 14), (width, height)
        assert (plan.patches, plan.rows) == (h * w // 14**2, h * w // 28**2), (width, height)


@pytest.mark.parametrize("half", [14, 42, 70, 98])
def test_halves_round_to_even(half: int) -> None:
    """14 / 28 = 0.5 rounds to 0, 42 / 28 = 1.5 to 2."""
    smart_resize = transformers.models.qwen2_vl.image_processing_qwen2_vl.smart_resize
    h, w = smart_resize(half, 280, factor=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    assert image_sizes.qwen_smart_resize(280, half, {}, PROCESSOR).grid == Grid(1, h // 14, w // 14)


def test_llava_counts_do_not_depend_on_the_size() -> None:
    plans = {image_sizes.llava_fixed(w, h, CONFIG, {"patch_size": 14}) for w, h in [(1, 1), (336, 336), (600, 3)]}
    assert {plan.rows for plan in plans} == {576} and {plan.patches for plan in plans} == {577}


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 50_000_000)])
def test_llava_refuses_strips_that_resizing_would_blow_up(width: int, height: int) -> None:
    with pytest.raises(image_sizes.UnsupportedSize, match="200 times"):
        image_sizes.llava_fixed(width, height, CONFIG, {"patch_size": 14})


def test_llava_full_selection_keeps_the_class_token() -> None:
    assert image_sizes.llava_fixed(9, 9, CONFIG, {"patch_size": 14, "vision_feature_select_strategy": "full"}).rows == 577
