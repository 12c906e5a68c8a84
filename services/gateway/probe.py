"""What the gateway knows of a picture: its size from headers. Pixels are never decoded."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib

from PIL import ExifTags, Image

from services.common.errors import invalid
from services.decoding.image_files import ACCEPTED, FORMATS
from services.models.media import Picture

# JPEG includes MPO; an animation counts as its first frame.
_PNG = b"\x89PNG\r\n\x1a\n"
_CHUNK = re.compile(rb"\w{4}")
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
Image.MAX_IMAGE_PIXELS = None  # probe_image has its own limit
warnings.filterwarnings("ignore", module=r"PIL\.")  # about damaged metadata


def probe_image(data: bytes, field: str, *, max_pixels: int) -> Picture:
    """Read a picture's size in pixels after any EXIF turn.

    Raises:
        ServiceError: INVALID_ARGUMENT about ``field``: the bytes are no picture, or it is larger than ``max_pixels``.
    """
    if not data:
        raise invalid(field, f"holds no bytes; send a picture as {ACCEPTED}")
    try:
        with _open(data) as image:
            width, height = image.size
            if _turned_sideways(image):
                width, height = height, width
    except Exception:  # whatever a format's parser raises on bad headers
        raise invalid(field, f"not a picture that can be read; accepted are {ACCEPTED}", reason="BAD_MEDIA") from None
    if width < 1 or height < 1:
        raise invalid(field, f"{width} x {height} pixels: both sides must be at least 1", reason="BAD_MEDIA")
    if width * height > max_pixels:
        text = f"{width} x {height} pixels are {width * height}, the limit is {max_pixels}; send a smaller picture"
        raise invalid(field, text, reason="MEDIA_TOO_LARGE", limit=max_pixels, requested=width * height)
    return Picture(width, height)


def _turned_sideways(image: Image.Image) -> bool:
    """Whether a viewer swaps the sides of what ``image.size`` says."""
    if ExifTags.Base.Orientation in getattr(image, "tag_v2", ()):
        return False  # Pillow has turned the size of a TIFF already
    try:
        # The base class's method: PNG's own decodes the picture first, to find metadata behind it.
        return Image.Image.getexif(image).get(ExifTags.Base.Orientation) in _SIDEWAYS
    except Exception:  # malformed EXIF: shown as it is stored
        return False


def _open(data: bytes) -> Image.Image:
    """Open a picture so that its metadata is known, wherever its file has it, without decoding."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if not data.startswith(_PNG):
        return image
    moved = _metadata_first(data, animated=getattr(image, "is_animated", False))
    return image if moved is data else Image.open(io.BytesIO(moved), formats=FORMATS)


def _metadata_first(data: bytes, *, animated: bool) -> bytes:
    """A PNG may state its orientation behind its pixels: bring such chunks to the front, where opening it finds them.

    Only what decoding reads counts: up to the end, a broken chunk or an animation's next frame. Checksums do not matter there.
    """
    pixels, late = 0, []
    at = len(_PNG)
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length  # of the chunk but for its checksum
        if kind == b"IEND" or not _CHUNK.fullmatch(kind) or (pixels and animated and kind == b"fcTL"):
            break
        if kind == b"IDAT":
            pixels = pixels or at
        elif pixels and kind in _PNG_METADATA and end <= len(data):
            late.append(data[at:end] + struct.pack(">I", zlib.crc32(data[at + 4 : end])))
        at = end + 4
    return data[:pixels] + b"".join(late) + data[pixels:] if late else data
