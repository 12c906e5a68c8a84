"""Token arithmetic of still pictures, one function a scheme. Torch-free; held equal to the processors by golden tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.models.media import Grid, ItemPlan, Modality

MAX_ASPECT = 200


class UnsupportedSize(ValueError):
    """A picture that the family cannot take; the text names the limit."""


def qwen_smart_resize(width: int, height: int, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ItemPlan:
    """Qwen2-VL: sides rounded to whole merged patches, area kept between two bounds.

    Source: Wang et al., "Qwen2-VL" (arXiv 2409.12191), section 2.1, and ``smart_resize`` of transformers 5.24. Rounding is
    Python's: half to even.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    _check_aspect(width, height)
    patch, merge = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
    factor = patch * merge
    size = processor.get("size") or {}
    low = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    high = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > high:
        beta = math.sqrt(height * width / high)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif h * w < low:
        beta = math.sqrt(low / (height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    grid = Grid(1, h // patch, w // patch)
    patches = grid.h * grid.w
    return ItemPlan(Modality.IMAGE, patches // merge**2, grid, patches)


def llava_fixed(width: int, height: int, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ItemPlan:
    """LLaVA-1.5: every picture is cropped to one square, so the count does not depend on its size.

    Source: Liu et al., "Improved Baselines with Visual Instruction Tuning" (arXiv 2310.03744), and ``LlavaProcessor`` of
    transformers 5.24: one class token is added by CLIP and dropped again by the "default" feature selection.

    Raises:
        UnsupportedSize: one side is more than 200 times the other. The processor would scale the short side up to the crop's
            and then hold the long one: 3000 x 1 pixels become 2 GB.
    """
    _check_aspect(width, height)
    vision = config["vision_config"]
    crop = processor.get("crop_size") or {}
    patch = int(processor.get("patch_size") or vision["patch_size"])
    rows = int(crop.get("height") or vision["image_size"]) // patch
    columns = int(crop.get("width") or vision["image_size"]) // patch
    tokens = rows * columns + int(processor.get("num_additional_image_tokens", 1))
    if (processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy", "default")) == "default":
        tokens -= 1
    return ItemPlan(Modality.IMAGE, tokens, Grid(1, rows, columns), rows * columns + 1)


def _check_aspect(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnsupportedSize(f"{width} x {height} pixels: one side may be at most {MAX_ASPECT} times the other")
