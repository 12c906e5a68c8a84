"""What is asked of a GPU's JPEG decoder, with libjpeg-turbo in its place; tests/gpu has the real one."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from services.decoding.images import decode_image
from services.decoding.specs import ImageSpec
from services.encoder.gpu_jpeg import GpuJpeg
from tests.media_files import file_bytes, picture

LIMIT = 100_000


def on_cpu(data: bytes) -> torch.Tensor:
    return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).movedim(-1, 0)


def by_workers(data: bytes) -> np.ndarray:
    made: list[np.ndarray] = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    decode_image(data, ImageSpec(LIMIT), allocate)
    return made[-1]


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return file_bytes(picture(50, 30), "JPEG", exif=exif)


@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_turned_as_the_workers_turn_them(orientation: int) -> None:
    data = turned(orientation)
    assert np.array_equal(GpuJpeg(LIMIT, on_cpu)(data), by_workers(data))


def broken(data: bytes) -> torch.Tensor:
    raise RuntimeError("nvJPEG says no")


def other_size(data: bytes) -> torch.Tensor:
    return torch.zeros(3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (file_bytes(picture(40, 40), "PNG"), on_cpu),
        (file_bytes(picture(40, 40).convert("L"), "JPEG"), on_cpu),
        (file_bytes(picture(40, 40).convert("CMYK"), "JPEG"), on_cpu),
        (file_bytes(picture(40, 40), "JPEG")[:-300], on_cpu),
        (file_bytes(picture(400, 300), "JPEG"), on_cpu),
        (b"\xff\xd8\xff\xd9", on_cpu),
        (b"", on_cpu),
        (file_bytes(picture(40, 40), "JPEG"), broken),
        (file_bytes(picture(40, 40), "JPEG"), other_size),
    ],
    ids=["PNG", "grey", "CMYK", "cut off", "too large", "no picture", "empty", "refused by the GPU", "another size"],
)
def test_everything_else_is_left_to_the_workers(data: bytes, decode: Callable[[bytes], torch.Tensor]) -> None:
    assert GpuJpeg(LIMIT, decode)(data) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_one_says_so_at_start() -> None:
    with pytest.raises(RuntimeError, match="--jpeg-decoder gpu"):
        GpuJpeg(LIMIT)


def test_the_stand_in_decodes() -> None:
    data = file_bytes(picture(40, 40), "JPEG")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), on_cpu(data).movedim(0, -1).numpy())
