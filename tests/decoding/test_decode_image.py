"""Decoding against Pillow, and bytes that are no picture."""

from __future__ import annotations

import io
import random
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.decoding.images import decode_image
from services.decoding.refusals import Refused
from services.decoding.specs import ImageSpec
from tests.media_files import file_bytes, picture, png_header

MAX_PIXELS = 1_000_000
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow, about the damage done here
EXIF_ORIENTATION = 0x0112


def decode(data: bytes) -> Image.Image:
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    decode_image(data, ImageSpec(MAX_PIXELS), allocate)
    return Image.fromarray(arrays[-1])


def refused(data: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        decode(data)
    return caught.value


def same(ours: Image.Image, theirs: Image.Image) -> bool:
    return ours.size == theirs.size and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK"])
def test_ordinary_pictures_are_what_pillow_makes_of_them(format: str, mode: str) -> None:
    try:
        data = file_bytes(picture(61, 37).convert(mode), format)
    except (OSError, ValueError):
        pytest.skip(f"{format} has no mode {mode}")
    assert same(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 40, "restart_marker_blocks": 2}, {"optimize": True}])
def test_jpeg_has_the_pixels_that_pillow_gives(
    subsampling: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file_bytes(picture(61, 37), "JPEG", subsampling=subsampling, **options)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    monkeypatch.setattr(Image.Image, "convert", None)  # the slow way would call it
    assert same(decode(data), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    data = file_bytes(picture(40, 24), format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert expected.size == ((40, 24) if orientation < 5 else (24, 40))
    assert same(decode(data), expected)


@pytest.mark.parametrize("kind, value", [(2, b"6\0\0\0"), (7, b"6\0\0\0"), (11, b"\xcd\xcc\xdc@")])  # text, bytes, 6.9
def test_an_orientation_that_is_no_whole_number_is_ignored(kind: int, value: bytes) -> None:
    tag = b"II*\0\x08\0\0\0\1\0" + bytes([0x12, 1, kind, 0, 1, 0, 0, 0]) + value + b"\0" * 4
    data = file_bytes(picture(40, 24), "JPEG", exif=b"Exif\0\0" + tag)
    assert same(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


def test_a_damaged_orientation_tag_is_ignored() -> None:
    data = file_bytes(picture(40, 24), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f" + b"\xff" * 40)
    assert same(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 51))
    assert [decode(file_bytes(image.convert(mode))).getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (255,) * 3, (204,) * 3]


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_transparent_palette_entry_is_white(format: str) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((1, 0), 1)
    pixels = decode(file_bytes(image, format, transparency=0))
    assert (pixels.getpixel((0, 0)), pixels.getpixel((1, 0))) == ((255, 255, 255), (200, 0, 0))


def test_a_transparent_colour_of_an_rgb_png_is_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 8, 7))
    pixels = decode(file_bytes(image, transparency=(1, 2, 3)))
    assert (pixels.getpixel((0, 0)), pixels.getpixel((1, 0))) == ((255, 255, 255), (9, 8, 7))


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled(format: str) -> None:
    samples = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    pixels = np.asarray(decode(file_bytes(Image.fromarray(samples), format)))
    assert pixels[0].tolist() == [[v] * 3 for v in (0, 0, 1, 1, 128, 255)]


def test_the_first_frame_of_an_animation_is_taken() -> None:
    first, second = picture(20, 20, 1), picture(20, 20, 2)
    for format, options in (("WEBP", {"lossless": True}), ("PNG", {})):
        data = file_bytes(first, format, save_all=True, append_images=[second], **options)
        assert same(decode(data), first)


@pytest.mark.parametrize(
    "data", [b"not a picture at all", b"\xff\xd8\xff", b"<svg></svg>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\0" * 500, b""]
)
def test_other_files_are_refused(data: bytes) -> None:
    assert refused(data).code == "IMAGE_UNREADABLE"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_truncated_files_are_named(format: str, share: float) -> None:
    data = file_bytes(picture(120, 90), format)
    assert refused(data[: int(len(data) * share)]).code == "IMAGE_TRUNCATED"


def test_a_truncated_avif_is_refused() -> None:
    data = file_bytes(picture(120, 90), "AVIF")
    refused(data[: len(data) // 2])


@pytest.mark.parametrize(("width", "height"), [(0, 10), (10, 0)])
def test_a_picture_without_pixels_is_refused(width: int, height: int) -> None:
    refused(png_header(width, height))


@pytest.mark.parametrize(("width", "height"), [(1000, 1001), (60_000, 60_000)])
def test_too_many_pixels_are_refused_from_the_header(width: int, height: int) -> None:
    error = refused(png_header(width, height))
    assert error.code == "IMAGE_TOO_LARGE"
    assert error.figures == {"width": width, "height": height, "limit": MAX_PIXELS, "requested": width * height}


def test_thirty_two_bit_samples_are_refused() -> None:
    data = file_bytes(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF")
    assert refused(data).code == "IMAGE_SAMPLES"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_damaged_bytes_give_a_picture_or_a_typed_error(format: str) -> None:
    chance = random.Random(format)
    whole = file_bytes(picture(32, 24), format)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with suppress(Refused):
            decode(bytes(data[: chance.randint(1, len(data))] if chance.random() < 0.3 else data))
