"""Facts of pictures from their headers alone."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import grpc
import numpy as np
import pytest
from gateway_fakes import picture, refused
from PIL import Image, ImageFile, ImageOps

from services.gateway import probe
from services.gateway.probe import probe_image
from services.models.media import Picture
from tests.media_files import DATA, file_bytes

FIELD, LIMIT = "messages[0].parts[1].image", 50_000_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ORIENTATION = 0x0112


def facts(data: bytes, limit: int = LIMIT) -> Picture:
    return probe_image(data, FIELD, max_pixels=limit)


def viewed(data: bytes) -> tuple[int, int]:
    """The size that a viewer shows."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return ImageOps.exif_transpose(image).size


def exif(orientation: Any) -> bytes:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags.tobytes()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def ihdr(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ImageFile.ImageFile) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_size(format: str, no_decoding: None) -> None:
    data = picture(40, 24, format)
    assert facts(data) == Picture(40, 24)


def test_a_phone_s_picture(no_decoding: None) -> None:
    data = (DATA / "still.heic").read_bytes()
    with Image.open(io.BytesIO(data)) as shown:
        assert facts(data) == Picture(*shown.size)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF"])
def test_little_is_read(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of megabytes, at most 64 KiB. WebP, AVIF and HEIF are handed to their libraries whole, which read no more than headers."""
    noise = np.random.default_rng(1).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)
    shown = Image.fromarray(noise[:, :, 0]) if format == "GIF" else Image.fromarray(noise)
    data = file_bytes(shown, format)
    read = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read
            found = super().read(size)
            read += len(found)
            return found

    monkeypatch.setattr(probe.io, "BytesIO", Counted)
    assert facts(data) == Picture(1600, 1200)
    assert 0 < read <= 64 * 1024 < len(data) // 10


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation_as_a_viewer_shows_it(format: str, orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture(40, 24, format, exif=exif(orientation))
    expected = viewed(data)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("pixels were decoded"))
    found = facts(data)
    assert (found.width, found.height) == expected
    assert expected == ((24, 40) if orientation in (5, 6, 7, 8) else (40, 24))


def test_orientation_behind_the_pixels_of_a_png() -> None:
    plain = picture(40, 24)
    end = plain.index(b"IEND") - 4
    data = plain[:end] + chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0")) + plain[end:]
    assert viewed(data) == (24, 40)
    assert (facts(data).width, facts(data).height) == (24, 40)


def test_late_metadata_counts_as_far_as_decoding_reads() -> None:
    tag = chunk(b"eXIf", exif(6).removeprefix(b"Exif\0\0"))
    plain = picture(40, 24)
    moving = picture(40, 24, save_all=True, append_images=[Image.new("RGB", (40, 24), "red")])
    end, frame = plain.index(b"IEND") - 4, moving.index(b"fcTL", moving.index(b"IDAT")) + 34
    late = {
        "wrong checksum": plain[:end] + tag[:-1] + b"x" + plain[end:],
        "file ends in it": plain[:end] + tag[:-4],
        "broken chunk first": plain[:end] + chunk(b"e\x01If", b"") + tag + plain[end:],
        "behind the end": plain + tag,
        "of the second frame": moving[:frame] + tag + moving[frame:],
    }
    sizes = {name: (facts(data).width, facts(data).height) for name, data in late.items()}
    assert sizes == {name: viewed(data) for name, data in late.items()}
    assert [name for name, size in sizes.items() if size == (24, 40)] == ["wrong checksum", "file ends in it"]


def test_orientation_in_xmp() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for format in ("WEBP", "JPEG"):
        data = picture(40, 24, format, xmp=xmp)
        assert ((facts(data).width, facts(data).height)) == viewed(data) == (24, 40)


def test_malformed_exif_means_as_stored() -> None:
    for bad in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 30):
        found = facts(picture(40, 24, "JPEG", exif=bad))
        assert (found.width, found.height) == (40, 24)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_count_as_one_frame(format: str) -> None:
    data = picture(40, 24, format, save_all=True, append_images=[Image.new("RGB", (40, 24))] * 2)
    assert (facts(data).width, facts(data).height) == (40, 24)


def test_two_pictures_of_a_camera() -> None:
    out = io.BytesIO()
    Image.new("RGB", (40, 24)).save(out, "MPO", save_all=True, append_images=[Image.new("RGB", (40, 24))])
    assert facts(out.getvalue()).width == 40


BAD = {
    "text": b"hello, this is no picture",
    "pdf": b"%PDF-1.7\n",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>",
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "ico": picture(16, 16, "ICO"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "png signature": b"\x89PNG\r\n\x1a\n",
    "half an IHDR": ihdr(10, 10)[:20],
    "zero wide": ihdr(0, 10) + chunk(b"IDAT", b""),
    "zero high": ihdr(10, 0) + chunk(b"IDAT", b""),
    "gif header": b"GIF89a",
    "jpeg start": picture(40, 24, "JPEG")[:30],
    "webp start": picture(40, 24, "WEBP")[:20],
    "compressed text bomb": ihdr(9, 9) + chunk(b"zTXt", b"k\0\0" + zlib.compress(b"0" * (8 << 20))) + chunk(b"IDAT", b""),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_picture(name: str) -> None:
    with refused(INVALID, "JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF and HEIF") as errors:
        facts(BAD[name])
    assert errors[0].field == FIELD
    assert "0x" not in errors[0].message and "object" not in errors[0].message


def test_no_bytes() -> None:
    with refused(INVALID, "no bytes") as errors:
        facts(b"")
    assert errors[0].field == FIELD


def test_bombs_are_refused_from_the_header(no_decoding: None) -> None:
    for width, height in [(60_000, 60_000), (20_000, 20_000), (9_400, 9_400), (50_000_001, 1)]:
        with refused(INVALID, "50000000") as errors:
            facts(ihdr(width, height) + chunk(b"IDAT", b"x" * 64))
        assert errors[0].metadata == {"limit": "50000000", "requested": str(width * height)}
    assert facts(ihdr(50_000_000, 1) + chunk(b"IDAT", b"")).width == 50_000_000
