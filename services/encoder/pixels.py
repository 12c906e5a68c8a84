"""Pixels to what the towers take. Sizes, crops, tiles and pads are transformers' processors'; what costs time under them is ours.

Bit for bit what those processors make of the same pixels, which stay where the decoder put them: ``[height, width, 3]`` seen as
``[3, height, width]``. torch's antialiased kernel for bytes reads and writes that layout as it is, where the processors
rearrange the whole picture first; numbers are made in the pass that also puts them into their final order, by compiled code
that looks them up or, where there is no compiler, by torch.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch

from services.encoder import pixel_kernel
from services.models.hf import transformers
from services.models.image_sizes import looked_at
from services.models.media import AS_SET, Grid, Look

_CACHED = 2**17  # numbers that torch makes at a time, which stay in the core's own cache until they are finished


class _InPlace:
    """Mixed in before a processor's class: takes ``[3, height, width]`` of uint8 with any strides, and copies nothing."""

    def process_image(self, image: torch.Tensor, *settings: Any, **more: Any) -> torch.Tensor:
        assert image.dtype is torch.uint8 and len(image) == 3, f"{image.dtype} {tuple(image.shape)}"
        return image

    def _preprocess(self, *arguments: Any, return_tensors: Any = None, **settings: Any) -> Any:
        """What is one of its kind becomes a batch as it lies; theirs would be copied into one."""
        output = super()._preprocess(*arguments, return_tensors=None, **settings)  # type: ignore[misc]
        for name, made in output.items():
            if isinstance(made, list) and len(made) == 1 and isinstance(made[0], torch.Tensor):
                output[name] = made[0][None]
        return output.convert_to_tensors(return_tensors)

    def rescale_and_normalize(
        self, images: torch.Tensor, do_rescale: bool, rescale_factor: float, do_normalize: bool, image_mean: Any, image_std: Any
    ) -> torch.Tensor:
        if not (do_rescale and do_normalize and images.dtype is torch.uint8):
            theirs = super().rescale_and_normalize  # type: ignore[misc]
            return theirs(images, do_rescale, rescale_factor, do_normalize, image_mean, image_std)  # type: ignore[no-any-return]
        settings = rescale_factor, tuple(image_mean), tuple(image_std)
        made, kernel = _memory(*images.shape), pixel_kernel.load()
        if kernel is None:
            mean, std = _in_levels(*settings)
            return made.copy_(images).sub_(mean).div_(std)
        kernel.planes(images.reshape(-1, *images.shape[-3:]), _numbers(*settings), made.view(-1, *images.shape[-3:]))
        return made


def copying_nothing(processor: Any) -> Any:
    """The processor, which from now on takes pictures as :func:`view` gives them, and only so."""
    assert isinstance(processor, transformers.image_processing_backends.TorchvisionBackend), (
        f"{type(processor).__name__} needs torchvision"
    )
    cls = type(processor)
    processor.__class__ = type(cls.__name__, (_InPlace, cls), {})
    return processor


def bounded(size: Any, look: Look) -> Any:
    """A processor's ``shortest_edge`` and ``longest_edge``, which count pixels, as a caller wants them."""
    if look == AS_SET:
        return size
    low, high = looked_at(look, size["shortest_edge"], size["longest_edge"])
    return transformers.image_utils.SizeDict(shortest_edge=low, longest_edge=high)


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
    settings = (
        processor.rescale_factor if processor.do_rescale else 1.0,
        tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
        tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
    )
    made, kernel = _memory(steps, down, across, merge, merge, 3, depth, patch, patch), pixel_kernel.load()
    if kernel is None:
        _cut(frames, made, *_in_levels(*settings))
    else:
        kernel.patches(frames, _numbers(*settings), made)
    return made.flatten(5).flatten(0, 4), Grid(steps, down * merge, across * merge)


def _cut(frames: torch.Tensor, made: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
    """Frames into ``made`` ``[steps, down, across, merge, merge, 3, depth, patch, patch]``, by torch."""
    steps, down, across, merge, _, _, depth, patch, _ = made.shape
    count = len(frames)
    cut = frames.reshape(count, 3, down, merge, patch, across, merge, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [frames, down, across, merge, merge, 3, patch, patch]
    lines = max(1, _CACHED // cut[0, 0].numel())
    for index, top in itertools.product(range(steps * depth), range(0, down, lines)):
        place = made[index // depth, top : top + lines].select(5, index % depth)
        if index < count:
            place.copy_(cut[index, top : top + lines]).sub_(mean).div_(std)
        else:
            place.copy_(made[-1, top : top + lines].select(5, (count - 1) % depth))


def _memory(*shape: int) -> torch.Tensor:
    """float32 for a result. numpy asks for large pages; without, a large picture spends as long on page faults as on work."""
    return torch.from_numpy(np.empty(shape, np.float32))


@functools.lru_cache
def _in_levels(rescale_factor: float, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel ``[3, 1, 1]`` in levels of a byte, rounded as the processors do."""
    factor = 1.0 / rescale_factor
    return torch.tensor(mean)[:, None, None] * factor, torch.tensor(std)[:, None, None] * factor


@functools.lru_cache
def _numbers(rescale_factor: float, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """What becomes of each byte of each channel, ``[3, 256]``, by the arithmetic of the processors."""
    middle, deviation = _in_levels(rescale_factor, mean, std)
    return torch.arange(256.0).sub(middle[:, 0]).div(deviation[:, 0])
