"""How a user of transformers asks for low detail, or for other bounds of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.models.media import Look
from services.models.registry import FAMILIES

# The processor's own switch for few tokens, of each family whose processor has one.
SWITCH: dict[str, dict[str, Any]] = {
    "internvl": {"min_patches": 1, "max_patches": 1},
    "smolvlm": {"do_image_splitting": False},
    "idefics3": {"do_image_splitting": False},
    "gemma3": {"do_pan_and_scan": False},
    "gemma4": {"max_soft_tokens": 70},
    "phi4_multimodal": {"dynamic_hd": 1},
}


@contextmanager
def switched(processor: Any, family: str, look: Look, model: Any = None) -> Iterator[dict[str, Any]]:
    """The settings to pass to the image processor for this look.

    LLaVA-NeXT's processor only heeds the resolutions that its image processor has, and its model those of its configuration:
    both have others meanwhile.
    """
    image = processor.image_processor
    if FAMILIES[family].any_size:
        own, cap = image.size, 512 * 512 if look.low else 10**9
        most = min(look.max_pixels or own["longest_edge"], cap)
        yield {"size": {"shortest_edge": min(look.min_pixels or own["shortest_edge"], most), "longest_edge": most}}
    elif family == "llava_next" and look.low:
        several = image.image_grid_pinpoints
        holders = [image] if model is None else [image, model.base_model.config]
        for holder in holders:
            holder.image_grid_pinpoints = [[image.crop_size["height"], image.crop_size["width"]]]
        try:
            yield {}
        finally:
            for holder in holders:
                holder.image_grid_pinpoints = several
    else:
        yield SWITCH.get(family, {}) if look.low else {}
