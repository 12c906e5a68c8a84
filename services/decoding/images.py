"""Bytes of a picture to RGB pixels. Limits are applied to the header before a pixel is decoded. Knows nothing of models."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from services.decoding.image_files import FORMATS
from services.decoding.refusals import Refused
from services.decoding.specs import Allocate, Array, Facts, ImageSpec

_TURNS: dict[int, Callable[[Array], Array]] = {  # of [height, width, 3]
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}

Image.MAX_IMAGE_PIXELS = None  # the spec has the limit, which is checked before decoding
warnings.filterwarnings("ignore", module=r"PIL\.")  # about damaged metadata that pixels do not depend on


def decode_image(data: bytes, spec: ImageSpec, allocate: Allocate) -> Facts:
    """The first frame, turned as its orientation tag says, on white where it is transparent.

    Raises:
        Refused: the bytes are no picture, are damaged, or the picture is too large.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # plugins raise whatever the bytes make them raise
        raise _unreadable(data, error) from None
    with image:
        _check(image, spec)
        try:
            if not _fast_jpeg(data, image, allocate):
                image.load()  # before asking for tags: a PNG's may stand behind its pixels, whose damage would go unseen
                _put(np.asarray(_rgb(image)), turn_of(image), allocate)
        except Refused:
            raise
        except Exception as error:
            raise _unreadable(data, error) from None
    return Facts()


def _check(image: Image.Image, spec: ImageSpec) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise Refused("IMAGE_EMPTY", width=width, height=height)
    if width * height > spec.max_pixels:
        raise Refused("IMAGE_TOO_LARGE", width=width, height=height, limit=spec.max_pixels, requested=width * height)


def _put(pixels: Array, turn: Callable[[Array], Array] | None, allocate: Allocate) -> None:
    turned = pixels if turn is None else turn(pixels)
    allocate(turned.shape, np.uint8)[...] = turned


def _fast_jpeg(data: bytes, image: Image.Image, allocate: Allocate) -> bool:
    """Decode an undamaged colour JPEG without Pillow: the same pixels in a third of the time. False: Pillow is to do it."""
    if image.format not in ("JPEG", "MPO") or image.mode != "RGB":
        return False
    size, turn = (image.height, image.width), turn_of(image)
    try:
        if simplejpeg.decode_jpeg_header(data)[:2] != size:
            return False
        if turn is None:
            simplejpeg.decode_jpeg(data, "RGB", buffer=allocate((*size, 3), np.uint8))
        else:
            _put(simplejpeg.decode_jpeg(data, "RGB"), turn, allocate)
    except ValueError:  # raised for mere warnings too; Pillow tells what is wrong
        return False
    return True


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        samples = np.asarray(image).astype(np.uint32)  # [height, width]
        return Image.fromarray(((samples + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise Refused("IMAGE_SAMPLES")
    if image.has_transparency_data:
        pixels = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")
    return image.convert("RGB")


def turn_of(image: Image.Image) -> Callable[[Array], Array] | None:
    """What the orientation tag asks for. Only whole numbers count, as in the gateway's probe, or the two sizes would differ."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged tag says nothing; viewers show such a picture as it is
        return None


def _unreadable(data: bytes, error: Exception) -> Exception:
    if isinstance(error, MemoryError):
        return error
    # a RIFF file (WEBP) says its length after the tag
    short_riff = data[:4] == b"RIFF" and len(data) < 8 + int.from_bytes(data[4:8], "little")
    if isinstance(error, EOFError) or "truncated" in str(error).lower() or short_riff:
        return Refused("IMAGE_TRUNCATED")
    return Refused("IMAGE_UNREADABLE")
