"""Qwen's vision models: pictures and clips from one tower, with grids; and families that take text only."""

from __future__ import annotations

from typing import Any

from services.models.media import Grid, Modality
from tests.oracle import Item, Takes
from tests.oracle.prompt import in_order

CALLS = {
    Modality.IMAGE: ("get_image_features", "pixel_values", "image_grid_thw"),
    Modality.VIDEO: ("get_video_features", "pixel_values_videos", "video_grid_thw"),
}


def seconds(inputs: Any, index: int) -> dict[str, float]:
    """How much time one temporal step of a clip spans, where the family's positions need it."""
    for name in ("second_per_grid_ts", "video_second_per_grid"):
        if name in inputs:
            return {"second_per_grid": float(inputs[name][index])}
    return {}


def seen_items(model: Any, inputs: Any) -> list[Item]:
    """Pictures, then clips. Grids are in patches; four neighbouring ones make a row."""
    items = []
    for modality, (call, pixels, grids) in CALLS.items():
        if pixels not in inputs:
            continue
        out = getattr(model.base_model, call)(inputs[pixels], inputs[grids], return_dict=True)
        levels = getattr(out, "deepstack_features", None) or []
        for index, rows in enumerate(out.pooler_output):
            details = seconds(inputs, index) if modality is Modality.VIDEO else {}
            deepstack = tuple(level[index] for level in levels)
            items.append(Item(modality, rows, Grid(*inputs[grids][index].tolist()), deepstack, details))
    return items


def vision_items(model: Any, inputs: Any) -> list[Item]:
    """Pictures and clips as the prompt has them."""
    return in_order(model, inputs, seen_items(model, inputs))


def no_items(model: Any, inputs: Any) -> list[Item]:
    """Nothing, for text families."""
    return []


VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TEXT = ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma2", "gemma3_text")
ITEMS = {family: vision_items for family in VISION} | {family: no_items for family in TEXT}
TAKES = {family: Takes((Modality.IMAGE, Modality.VIDEO)) for family in VISION}
TAKES |= {family: Takes(()) for family in (*TEXT, "llama_dynamic")}
