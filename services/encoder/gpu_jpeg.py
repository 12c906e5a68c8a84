"""Colour JPEGs decoded by an NVIDIA GPU, where the operator asks for it: then bytes of clients are decoded in this process.

Everything but an undamaged, plain colour JPEG is left to the workers, so that refusals stay theirs.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from services.decoding.images import turn_of
from services.decoding.specs import Array
from services.models.torchvision_shim import ensure_torchvision

_END = b"\xff\xd9"
Decode = Callable[[bytes], torch.Tensor]


class GpuJpeg:
    """Decodes with ``decode``: the file's pixels as they are stored, uint8 ``[3, height, width]`` on any device.

    Args:
        max_pixels: larger pictures are left to the workers, which refuse them.
        decode: nvJPEG by default.

    Raises:
        RuntimeError: this torchvision or this machine has no nvJPEG.
    """

    def __init__(self, max_pixels: int, decode: Decode | None = None) -> None:
        self._max_pixels, self._decode = max_pixels, decode or _nvjpeg()

    def __call__(self, data: bytes) -> Array | None:
        """Pixels ``[height, width, 3]``, turned as the orientation tag says; None: the workers are to decode it."""
        if not data.rstrip(b"\0").endswith(_END):  # what is cut off would come out grey
            return None
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                (width, height), turn = image.size, turn_of(image)
                if image.format != "JPEG" or image.mode != "RGB" or width * height > self._max_pixels:
                    return None
            pixels = self._decode(data)
        except Exception:  # the workers say what is wrong with it
            return None
        if pixels.shape != (3, height, width):
            return None
        stored = pixels.movedim(0, -1).cpu().numpy()
        return np.ascontiguousarray(stored if turn is None else turn(stored))


def _nvjpeg() -> Decode:
    ensure_torchvision()
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(data: bytes) -> torch.Tensor:
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: torch.Tensor = decode_jpeg(coded, mode=ImageReadMode.RGB, device="cuda")
        return pixels

    out = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(out, "JPEG")
    try:
        decode(out.getvalue())
    except Exception as error:
        raise RuntimeError(f"--jpeg-decoder gpu: {type(error).__name__}: {error}") from error
    return decode
