"""Bytes of a picture to RGB pixels. Limits are applied to the header before a pixel is decoded.

Knows nothing of models. Texts are fixed sentences: what Pillow says about hostile bytes never reaches a client.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image

from services.common.errors import ServiceError, invalid
from services.models.image_files import ACCEPTED, FORMATS

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # decode_image has its own limit, which is checked before decoding and can be configured
warnings.filterwarnings("ignore", module=r"PIL\.")  # about damaged metadata that pixels do not depend on


def decode_image(data: bytes, field: str, max_pixels: int, check_size: Callable[[int, int], object]) -> Image.Image:
    """The first frame, turned as its orientation tag says, on white where it is transparent.

    Args:
        data: the file.
        field: the part's path in the client's request, for errors.
        max_pixels: largest width times height.
        check_size: called with the header's width and height; a ValueError refuses the picture with its text.

    Returns:
        A picture of mode RGB.

    Raises:
        ServiceError: INVALID_ARGUMENT; the bytes are no picture, are damaged, or the picture is too large.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # plugins raise whatever the bytes make them raise
        raise _unreadable(field, data, error) from None
    with image:
        _check(image, field, max_pixels, check_size)
        try:
            image.load()
            return _turned(_rgb(image), _turn(image))
        except ServiceError:
            raise
        except _Unsupported as error:
            raise invalid(field, str(error)) from None
        except Exception as error:
            raise _unreadable(field, data, error) from None


class _Unsupported(ValueError):
    pass


def _check(image: Image.Image, field: str, max_pixels: int, check_size: Callable[[int, int], object]) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise invalid(field, f"the image is {width} x {height} pixels; it needs at least 1 x 1")
    if width * height > max_pixels:
        raise invalid(
            field,
            f"the image is {width} x {height} pixels; at most {max_pixels} pixels are accepted, make it smaller",
            reason="IMAGE_TOO_LARGE",
            limit=max_pixels,
            requested=width * height,
        )
    try:
        check_size(width, height)
    except ValueError as error:
        raise invalid(field, str(error)) from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        samples = np.asarray(image).astype(np.uint32)  # [height, width]
        return Image.fromarray(((samples + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise _Unsupported("the image has 32 bits a sample; accepted are 1, 8 and 16, convert it first")
    if image.has_transparency_data:
        pixels = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")
    return image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What the orientation tag asks for. Only whole numbers count, as in the gateway's probe, or the two sizes would differ."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged tag says nothing; viewers show such a picture as it is
        return None


def _turned(image: Image.Image, turn: Image.Transpose | None) -> Image.Image:
    return image if turn is None else image.transpose(turn)


def _unreadable(field: str, data: bytes, error: Exception) -> ServiceError:
    # a RIFF file (WEBP) says its length after the tag
    short_riff = data[:4] == b"RIFF" and len(data) < 8 + int.from_bytes(data[4:8], "little")
    if isinstance(error, EOFError) or "truncated" in str(error).lower() or short_riff:
        return invalid(field, "the image data ends early (truncated file); send the whole file", reason="IMAGE_TRUNCATED")
    return invalid(field, f"the data is not a readable image; accepted are {ACCEPTED}", reason="IMAGE_UNREADABLE")
