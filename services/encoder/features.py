"""What differs between families in the encoder: how an item's rows are arranged, and how its inputs join a batch.

Knows nothing of threads, refs or messages. The default covers families whose ``get_image_features`` takes inputs joined
along their first dimension and answers with one matrix per item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from services.models.media import Grid

Inputs = Mapping[str, torch.Tensor]
Features = list[torch.Tensor]  # each [rows, hidden]; the first is merged into the prompt, later ones are deepstack


def _grid_from_thw(inputs: Inputs, config: Mapping[str, Any]) -> Grid:
    t, h, w = inputs["image_grid_thw"][0].tolist()  # [1, 3]
    return Grid(t, h, w)


def _grid_from_pixels(inputs: Inputs, config: Mapping[str, Any]) -> Grid:
    height, width = inputs["pixel_values"].shape[-2:]  # [1, channels, height, width]
    patch = int(config["vision_config"]["patch_size"])
    return Grid(1, height // patch, width // patch)


_GRIDS: dict[str, Callable[[Inputs, Mapping[str, Any]], Grid]] = {
    "qwen2_vl": _grid_from_thw,
    "llava": _grid_from_pixels,
}


def image_grid(model_type: str, inputs: Inputs, config: Mapping[str, Any]) -> Grid:
    """How the rows of a preprocessed image are arranged."""
    return _GRIDS[model_type](inputs, config)


def image_features(base: Any, batch: Sequence[Inputs], dtype: torch.dtype, device: torch.device) -> list[Features]:
    """The features of each image of a batch, on ``device``."""
    joined = {name: torch.cat([inputs[name] for inputs in batch]).to(device) for name in batch[0]}
    joined = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in joined.items()}
    output = base.get_image_features(**joined, return_dict=True)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]  # each: one [rows, hidden] per item
    return [list(item) for item in zip(*levels, strict=True)]
