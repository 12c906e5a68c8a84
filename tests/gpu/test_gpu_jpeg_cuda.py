"""nvJPEG against libjpeg-turbo, turned pictures included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.encoder.gpu_jpeg import GpuJpeg
from tests.encoder.test_gpu_jpeg import by_workers, turned
from tests.media_files import file_bytes, picture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("orientation", range(10))
def test_turned_pictures(orientation: int) -> None:
    data = turned(orientation)
    compare(GpuJpeg(10**6)(data), by_workers(data))


@pytest.mark.parametrize("size", [(1, 1), (17, 9), (200, 1), (256, 256), (300, 301)])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_sizes_and_subsampling(size: tuple[int, int], subsampling: int) -> None:
    data = file_bytes(picture(*size), "JPEG", quality=92, subsampling=subsampling)
    compare(GpuJpeg(10**6)(data), by_workers(data))


def compare(ours: np.ndarray | None, theirs: np.ndarray) -> None:
    """Decoders may differ in how they enlarge colour; of brightness little is left to choice."""
    assert ours is not None and ours.shape == theirs.shape
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.mean() <= 2.0
    grey = np.abs(ours.mean(axis=-1) - theirs.mean(axis=-1))
    assert grey.max() <= 12
