"""Token arithmetic of pictures that the tower sees whole, one function a scheme. Torch-free; golden tests hold it equal to
the processors. Settings are those of ``Checkpoint.settings``: the processor's own keys win over the model's config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.models.media import AS_SET, Grid, ItemPlan, Look, Modality, Picture

MAX_ASPECT = 200
LOW_PIXELS = 512 * 512  # of a picture at low detail, in families that take any size
Settings = Mapping[str, Any]  # under "look", a processor's may hold how closely the medium is looked at
# All pictures of a request, config, processor of each picture.
ImageScheme = Callable[[Sequence[Picture], Settings, Sequence[Settings]], list[ItemPlan]]


class UnsupportedSize(ValueError):
    """A medium that the family cannot take; the text names the limit.

    Attributes:
        item: which of the request's media it is, where several were planned at once.
    """

    item: int = 0


def each(scheme: Callable[[int, int, Settings, Settings], ItemPlan]) -> ImageScheme:
    """A scheme for a request whose pictures do not depend on one another."""

    def plan_all(pictures: Sequence[Picture], config: Settings, processors: Sequence[Settings]) -> list[ItemPlan]:
        plans: list[ItemPlan] = []
        try:
            for picture, processor in zip(pictures, processors, strict=True):
                plans.append(scheme(picture.width, picture.height, config, processor))
        except UnsupportedSize as error:
            error.item = len(plans)
            raise
        return plans

    return plan_all


def qwen_smart_resize(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen2-VL and its successors: sides rounded to whole merged patches, area kept between two bounds.

    Source: Wang et al., "Qwen2-VL" (arXiv 2409.12191), section 2.1, and ``smart_resize`` of transformers 5.24. Rounding is
    Python's: half to even.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    patch, merge = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
    low, high = pixel_bounds(processor, 56 * 56, 28 * 28 * 1280)
    h, w = smart_resize(width, height, patch * merge, low, high)
    grid = Grid(1, h // patch, w // patch)
    patches = grid.h * grid.w
    return ItemPlan(Modality.IMAGE, patches // merge**2, grid, patches)


def look_of(processor: Settings) -> Look:
    """How closely the medium is looked at."""
    look: Look = processor.get("look", AS_SET)
    return look


def pixel_bounds(processor: Settings, low: int, high: int) -> tuple[int, int]:
    """Least and most pixels after resizing, with the class's defaults; older files have keys of their own for them."""
    size = processor.get("size") or {}
    low = int(processor.get("min_pixels") or size.get("shortest_edge") or low)
    high = int(processor.get("max_pixels") or size.get("longest_edge") or high)
    return looked_at(look_of(processor), low, high)


def looked_at(look: Look, low: int, high: int) -> tuple[int, int]:
    """Least and most pixels, where the processor's own are ``low`` and ``high``. The most counts where the two contradict."""
    if look == AS_SET:
        return low, high
    high = look.max_pixels or max(high, look.min_pixels or 0)
    high = min(high, LOW_PIXELS) if look.low else high
    return min(look.min_pixels or low, high), high


def smart_resize(width: int, height: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Height and width in whole ``factor``, their product between ``low`` and ``high`` as far as the shape allows."""
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > high:
        beta = math.sqrt(height * width / high)
        return max(factor, math.floor(height / beta / factor) * factor), max(factor, math.floor(width / beta / factor) * factor)
    if h * w < low:
        beta = math.sqrt(low / (height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return h, w


def llava_fixed(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """LLaVA-1.5: every picture is cropped to one square, so the count does not depend on its size.

    Source: Liu et al., "Improved Baselines with Visual Instruction Tuning" (arXiv 2310.03744), and ``LlavaProcessor`` of
    transformers 5.24: one class token is added by CLIP and dropped again by the "default" feature selection.

    Raises:
        UnsupportedSize: one side is more than 200 times the other. The processor would scale the short side up to the crop's
            and then hold the long one: 3000 x 1 pixels become 2 GB.
    """
    check_aspect(width, height)
    vision = config["vision_config"]
    crop = processor.get("crop_size") or {}
    patch = int(processor.get("patch_size") or vision["patch_size"])
    rows = int(crop.get("height") or vision["image_size"]) // patch
    columns = int(crop.get("width") or vision["image_size"]) // patch
    tokens = rows * columns + class_tokens(config, processor)
    return ItemPlan(Modality.IMAGE, tokens, Grid(1, rows, columns), rows * columns + 1)


def class_tokens(config: Settings, processor: Settings) -> int:
    """What a LLaVA's tower adds to a tile's patches, less what feature selection drops again."""
    strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy", "default")
    return int(processor.get("num_additional_image_tokens", 1)) - int(strategy == "default")


def paligemma_fixed(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """PaliGemma: every picture is squeezed into one square.

    Source: Beyer et al., "PaliGemma" (arXiv 2407.07726), and ``PaliGemmaProcessor.replace_image_token`` of
    transformers 5.24.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    rows = int(processor.get("image_seq_length") or config["vision_config"]["num_image_tokens"])
    return ItemPlan(Modality.IMAGE, rows, Grid(1, 1, rows), rows)


def gemma4_resize(width: int, height: int, config: Settings, processor: Settings) -> ItemPlan:
    """Gemma 4: scaled to as many pooled patches as the budget allows, its shape kept, sides in whole pooled patches.

    Source: ``get_aspect_ratio_preserving_size`` in ``image_processing_gemma4`` of transformers 5.24.

    Raises:
        UnsupportedSize: one side is more than 200 times the other.
    """
    check_aspect(width, height)
    patch, pooling = int(processor.get("patch_size", 16)), int(processor.get("pooling_kernel_size", 3))
    budget = int(processor.get("max_soft_tokens", 280))
    side = patch * pooling
    scale = math.sqrt(budget * pooling**2 * patch**2 / (height * width))
    h, w = math.floor(scale * height / side), math.floor(scale * width / side)
    if h == 0:
        h, w = 1, min(width // height, budget)
    elif w == 0:
        h, w = min(height // width, budget), 1
    boi, eoi = processor.get("boi_token", "<|image>"), processor.get("eoi_token", "<image|>")
    return ItemPlan(Modality.IMAGE, h * w, Grid(1, 1, h * w), h * w * pooling**2, (boi, h * w, eoi))


def check_aspect(width: int, height: int) -> None:
    """Raise UnsupportedSize for a strip, which some processors would blow up to gigabytes or squeeze to nothing."""
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnsupportedSize(f"{width} x {height} pixels: one side may be at most {MAX_ASPECT} times the other")
