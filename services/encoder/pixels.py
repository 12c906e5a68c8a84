"""Pixels to what the towers take. Sizes, crops, tiles and pads are transformers' processors'; what costs time under them is ours.

Bit for bit what those processors make of the same pixels, which stay where the decoder put them: ``[height, width, 3]`` seen as
``[3, height, width]``. torch's antialiased kernel for bytes reads and writes that layout as it is, where the processors
rearrange the whole picture first; numbers are made in the pass that also puts them into their final order.
"""

from __future__ import annotations

from typing import Any

import torch

from services.models.hf import transformers
from services.models.media import Grid


class _InPlace:
    """Mixed in before a processor's class: takes ``[3, height, width]`` of uint8 with any strides, and copies nothing."""

    def process_image(self, image: torch.Tensor, *settings: Any, **more: Any) -> torch.Tensor:
        assert image.dtype is torch.uint8 and len(image) == 3, f"{image.dtype} {tuple(image.shape)}"
        return image

    def rescale_and_normalize(
        self, images: torch.Tensor, do_rescale: bool, rescale_factor: float, do_normalize: bool, image_mean: Any, image_std: Any
    ) -> torch.Tensor:
        if not (do_rescale and do_normalize and images.dtype is torch.uint8):
            theirs = super().rescale_and_normalize  # type: ignore[misc]
            return theirs(images, do_rescale, rescale_factor, do_normalize, image_mean, image_std)  # type: ignore[no-any-return]
        mean, std = _in_levels(rescale_factor, image_mean, image_std)
        return torch.empty(images.shape).copy_(images).sub_(mean).div_(std)


def copying_nothing(processor: Any) -> Any:
    """The processor, which from now on takes pictures as :func:`view` gives them, and only so."""
    assert isinstance(processor, transformers.image_processing_backends.TorchvisionBackend), f"{type(processor).__name__} needs torchvision"
    cls = type(processor)
    processor.__class__ = type(cls.__name__, (_InPlace, cls), {})
    return processor


def view(pixels: Any) -> torch.Tensor:
    """An array of uint8 ``[..., height, width, 3]`` as ``[..., 3, height, width]``, the same memory."""
    return torch.from_numpy(pixels).movedim(-1, -3)


def patches(processor: Any, frames: torch.Tensor) -> tuple[torch.Tensor, Grid]:
    """Frames cut as Qwen's towers take them: patches by time, then in squares of ``merge_size``, each by channel and frame.

    Args:
        processor: of the Qwen2-VL kind; where frames do not fill the last ``temporal_patch_size``, the last one is repeated.
        frames: uint8 ``[frames, 3, height, width]``, sides in whole merged patches.

    Returns:
        float32 ``[patches, 3 * temporal_patch_size * patch_size ** 2]``, and the grid of patches.
    """
    patch, merge, depth = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    count, _, height, width = frames.shape
    down, across, steps = height // (patch * merge), width // (patch * merge), -(-count // depth)
    cut = frames.unflatten(3, (across, merge, patch)).unflatten(2, (down, merge, patch))
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [frames, down, across, merge, merge, 3, patch, patch]
    mean, std = _in_levels(processor.rescale_factor, processor.image_mean, processor.image_std)
    made = torch.empty(steps, down, across, merge, merge, 3, depth, patch, patch)
    for index in range(steps * depth):
        place = made[index // depth].select(5, index % depth)
        if index < count:
            last = place.copy_(cut[index]).sub_(mean).div_(std)
        else:
            place.copy_(last)
    return made.flatten(5).flatten(0, 4), Grid(steps, down * merge, across * merge)


def _in_levels(rescale_factor: float, mean: Any, std: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel ``[3, 1, 1]`` in levels of a byte, rounded as the processors do."""
    return tuple(torch.tensor(values)[:, None, None] * (1.0 / rescale_factor) for values in (mean, std))  # type: ignore[return-value]
