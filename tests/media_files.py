"""Pictures, recordings and videos as files, and odd files with what must come of them."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

DATA = Path(__file__).parent / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "decoding.json").read_text())


def tone(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """float32 [samples, channels]: 440 Hz at half of full scale."""
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1).astype(np.float32)


def recording(samples: np.ndarray, rate: int, container: str, codec: str, form: str) -> bytes:
    """A file of samples [samples, channels] between -1 and 1."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        layout = "stereo" if samples.shape[1] == 2 else "mono"
        stream: Any = file.add_stream(codec, rate=rate, layout=layout, options={"strict": "experimental"})  # for vorbis
        scaled = samples if form in ("flt", "fltp") else (samples * 32767).round().astype(np.int16)
        for start in range(0, len(scaled), 960):
            part = scaled[start : start + 960]
            packed = np.ascontiguousarray(part.T) if form.endswith("p") else part.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format=form, layout=layout)
            frame.rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def level(index: int) -> int:
    """How bright frame ``index`` of :func:`video` is."""
    return 16 + index * 37 % 200


def video(
    count: int,
    container: str = "mp4",
    codec: str = "h264",
    times: Sequence[float] = (),
    size: tuple[int, int] = (64, 48),
    **options: str,
) -> bytes:
    """Grey frames, each of its own :func:`level`; 25 a second where no times are given."""
    out = io.BytesIO()
    if codec == "libx265" and count < 4:  # it gives no decoding time where fewer frames come than it would reorder
        options = {"x265-params": "bframes=0", **options}
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=25, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), level(index), np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * (times[index] if times else index / 25)), Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def sideways(mp4: bytes, quarters: int) -> bytes:
    """The same MP4 with a display matrix that turns it clockwise by so many quarters."""
    at = mp4.index(b"tkhd") + 4
    matrix = at + (52 if mp4[at] else 40)
    cos, sin = ((1, 0), (0, 1), (-1, 0), (0, -1))[quarters]
    rows = [cos, sin, 0, -sin, cos, 0]
    turned = b"".join((value * 65536 % 2**32).to_bytes(4, "big") for value in rows)
    return mp4[:matrix] + turned + mp4[matrix + 24 :]


def white_corner() -> bytes:
    """Two frames of 64 x 48, black but for the upper left quarter."""
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:24, :32] = 255
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("h264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(2):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 25)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def coded(data: bytes) -> list[tuple[int, int]]:
    """Where each coded frame of an MP4 starts, and its bytes."""
    with av.open(io.BytesIO(data)) as file:
        return [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, different for every seed."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(x / random.uniform(3, 30) + y / random.uniform(3, 30)) for _ in range(3)]
    pixels = np.stack(waves, axis=-1) + random.normal(0, 8, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def file_bytes(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format=format, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large and holds no pixels."""

    def chunk(tag: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + tag + body + zlib.crc32(tag + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
