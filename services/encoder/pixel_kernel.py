"""Builds, checks and calls ``pixel_kernel.cpp``: bytes of pictures to the towers' numbers, each looked up and written once.

The kernel is compared with torch before it is trusted. Without a compiler, or when it cannot be built, loaded or trusted,
:func:`load` returns None and says so once; callers then use torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")


class _Pictures(ctypes.Structure):
    _fields_ = (
        ("pixels", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "height", "width", "picture", "row", "column", "channel")),
    )


class PixelKernel:
    """The loaded library; safe to call from several threads.

    Every picture is uint8 ``[pictures, 3, height, width]`` of any strides; ``levels``, float32 ``[3, 256]`` and dense, says
    which number stands for which byte of a channel; ``out`` is float32 and dense.

    Raises:
        Unavailable: there is no such library.
    """

    def __init__(self) -> None:
        library = load_library(_SOURCE)
        self._patches, self._planes = library.triptych_patches, library.triptych_planes
        pointers = (ctypes.c_void_p,) * 3
        self._patches.argtypes = (*pointers, *(ctypes.c_int64,) * 3, ctypes.c_int)
        self._planes.argtypes = (*pointers, ctypes.c_int)
        self._patches.restype = self._planes.restype = None

    def patches(self, pictures: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` ``[steps, down, across, merge, merge, 3, depth, patch, patch]``; the last picture fills up its step."""
        steps, down, across, merge, _, _, depth, patch, _ = out.shape
        count, _, height, width = pictures.shape
        assert (height, width) == (down * merge * patch, across * merge * patch) and steps == -(-count // depth)
        self._patches(*_addresses(pictures, levels, out), patch, merge, depth, torch.get_num_threads())

    def planes(self, pictures: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out``, of the shape of ``pictures``."""
        assert out.shape == pictures.shape
        self._planes(*_addresses(pictures, levels, out), torch.get_num_threads())


def _addresses(pictures: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> tuple[object, int, int]:
    assert pictures.dtype is torch.uint8 and pictures.ndim == 4 and pictures.shape[1] == 3 and not pictures.is_cuda
    assert levels.dtype is torch.float32 and levels.shape == (3, 256) and levels.is_contiguous()
    assert out.dtype is torch.float32 and out.is_contiguous() and not out.is_cuda
    (count, _, height, width), (picture, channel, row, column) = pictures.shape, pictures.stride()
    shape = _Pictures(pictures.data_ptr(), count, height, width, picture, row, column, channel)
    return ctypes.byref(shape), levels.data_ptr(), out.data_ptr()


@functools.cache
def load() -> PixelKernel | None:
    """The kernel for this machine, built if need be; None, with one line in the log, where there can be none."""
    try:
        kernel = PixelKernel()
        _check(kernel)
    except Unavailable as error:
        logger.warning("pixels are prepared by torch, slower, because the kernel is not available: %s", error)
        return None
    return kernel


def _check(kernel: PixelKernel) -> None:
    """Compare with torch on random pictures.

    Raises:
        Unavailable: they differ.
    """
    random = torch.Generator().manual_seed(0)
    levels = torch.randn(3, 256, generator=random)
    for patch in (14, 16, 5):
        pictures = torch.randint(256, (3, 4 * patch, 2 * patch, 3), generator=random, dtype=torch.uint8).movedim(3, 1)
        want = torch.stack([levels[c][pictures[:, c].long()] for c in range(3)], 1)
        planes, patches = torch.empty(want.shape), torch.empty(2, 2, 1, 2, 2, 3, 2, patch, patch)
        kernel.planes(pictures, levels, planes)
        kernel.patches(pictures, levels, patches)
        cut = want[[0, 1, 2, 2]].reshape(2, 2, 3, 2, 2, patch, 1, 2, patch)
        if not torch.equal(planes, want) or not torch.equal(patches, cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)):
            raise Unavailable(f"its numbers differ from torch's, for patches of {patch} pixels")
