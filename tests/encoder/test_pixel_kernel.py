"""The compiled pass over pixels: what it writes, for any layout, and that it is used only where it can be trusted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from services.encoder import pixel_kernel
from services.encoder.pixel_kernel import PixelKernel
from services.native import build

LEVELS = torch.arange(3 * 256.0).view(3, 256)  # a number says from which channel and byte it came


@pytest.fixture
def kernel() -> PixelKernel:
    made = pixel_kernel.load()
    if made is None:
        pytest.skip("this machine has no C++ compiler")
    return made


def layouts(count: int, height: int, width: int) -> dict[str, torch.Tensor]:
    """Random bytes [count, 3, height, width] as decoders, resizers and crops leave them in memory."""
    made = torch.randint(256, (count, height + 5, width + 7, 3), dtype=torch.uint8).movedim(-1, 1)
    crop = made[:, :, 2 : height + 2, 3 : width + 3]
    return {
        "interleaved": crop.contiguous(memory_format=torch.channels_last),
        "planes": crop.contiguous(),
        "crop": crop,
        "mirrored": crop.contiguous().flip(3).transpose(2, 3).contiguous().transpose(2, 3),
        "one for all": crop[:1].expand(count, -1, -1, -1),
    }


def looked_up(pictures: torch.Tensor) -> torch.Tensor:
    return torch.arange(3.0)[:, None, None] * 256 + pictures


@pytest.mark.parametrize("height, width", [(1, 1), (3, 17), (300, 401)])
def test_planes_of_any_layout(kernel: PixelKernel, height: int, width: int) -> None:
    for name, pictures in layouts(2, height, width).items():
        out = torch.full(pictures.shape, torch.nan)
        kernel.planes(pictures, LEVELS, out)
        assert torch.equal(out, looked_up(pictures)), name


@pytest.mark.parametrize("patch, merge, depth, count", [(14, 2, 2, 1), (16, 2, 2, 5), (4, 1, 3, 4), (14, 2, 1, 2), (5, 3, 4, 1)])
def test_patches_are_in_order_and_the_last_picture_is_repeated(
    kernel: PixelKernel, patch: int, merge: int, depth: int, count: int
) -> None:
    steps, down, across = -(-count // depth), 3, 2
    for name, pictures in layouts(count, down * merge * patch, across * merge * patch).items():
        out = torch.full((steps, down, across, merge, merge, 3, depth, patch, patch), torch.nan)
        kernel.patches(pictures, LEVELS, out)
        numbers = looked_up(pictures)
        for step, i, j, y, x, t in torch.cartesian_prod(*map(torch.arange, (steps, down, across, merge, merge, depth))).tolist():
            top, left = (i * merge + y) * patch, (j * merge + x) * patch
            frame = numbers[min(step * depth + t, count - 1)]
            want = frame[:, top : top + patch, left : left + patch]
            assert torch.equal(out[step, i, j, y, x, :, t], want), (name, step, i, j, y, x, t)


def test_several_threads_write_the_same(kernel: PixelKernel) -> None:
    pictures = layouts(2, 280, 560)["interleaved"]
    made, threads = [], torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            patches, planes = torch.empty(1, 10, 20, 2, 2, 3, 2, 14, 14), torch.empty(2, 3, 280, 560)
            kernel.patches(pictures, LEVELS, patches)
            kernel.planes(pictures, LEVELS, planes)
            made.append((patches, planes))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_without_a_compiler_there_is_no_kernel_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pixel_kernel, "load_library", build.load_library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert pixel_kernel.load.__wrapped__() is None
    assert len(caplog.messages) == 1 and "no C++ compiler" in caplog.messages[0]


def test_a_kernel_that_writes_something_else_is_not_used(
    kernel: PixelKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PixelKernel, "planes", lambda self, pictures, levels, out: out.zero_())
    assert pixel_kernel.load.__wrapped__() is None
    assert "differ from torch's" in caplog.text
