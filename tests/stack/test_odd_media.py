"""Odd media through the running stack: an answer whose rows are those of the estimate, or INVALID_ARGUMENT that teaches."""

from __future__ import annotations

import asyncio
import io
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import triptych
from services.decoding.images import decode_image
from services.decoding.specs import ImageSpec
from services.gateway.probe import probe_image
from tests.media_files import DATA
from tests.stack.conftest import RunningStack
from tests.stack.processes import SERVICES

SEEN_BY_NO_CLIENT = re.compile(r"0x[0-9a-f]{6,}|Traceback|object at|(?<!image)/\w+/\w+|\d+\.\d+\.\d+\.\d+|\.py\b")
AT_ONCE = 16


@dataclass(frozen=True)
class Odd:
    """One item: what it is, and the size that it is shown with or words of its refusal; a recording has no size."""

    name: str
    part: triptych.MediaPart
    size: tuple[int, int] | None
    refused: list[str] | None = None

    def __str__(self) -> str:
        return self.name


def from_files() -> Iterator[Odd]:
    for entry in json.loads((DATA / "odd_media.json").read_text()):
        modality = entry.get("modality", "image")
        if "url" in entry:
            part = triptych.MediaPart(modality, url=entry["url"])
        else:
            part = triptych.MediaPart(modality, data=(DATA / "cases" / entry["file"]).read_bytes())
        size = tuple(entry["size"]) if "size" in entry else None
        yield Odd(entry["odd"], part, size, entry.get("refused"))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif(kind: int, value: bytes, count: int = 1) -> bytes:
    """A TIFF header with one tag, the orientation, of any type."""
    assert len(value) <= 4
    return b"II*\0\x08\0\0\0" + struct.pack("<HHHI", 1, 0x112, kind, count) + value.ljust(4, b"\0") + b"\0\0\0\0"


def turned() -> Iterator[Odd]:
    """The same 48 x 32 picture with its orientation in odd places and of odd types."""
    image = Image.new("RGB", (48, 32), "red")
    sideways, upright = (32, 48), (48, 32)
    six = exif(3, b"\x06\0")
    types = {
        "short 6": (six, sideways),
        "long 6": (exif(4, b"\x06"), sideways),
        "float 6.0": (exif(11, struct.pack("<f", 6.0)), sideways),
        "float 6.9": (exif(11, struct.pack("<f", 6.9)), upright),
        "text 6": (exif(2, b"6\0", 2), upright),
        "undefined 6": (exif(7, b"6"), upright),
        "short 9": (exif(3, b"\x09\0"), upright),
    }

    def file(format: str, **options: Any) -> bytes:
        out = io.BytesIO()
        image.save(out, format, **options)
        return out.getvalue()

    plain, moving = file("PNG"), file("PNG", save_all=True, append_images=[Image.new("RGB", (48, 32), "blue")])

    def inserted(data: bytes, before: bytes, *chunks: bytes) -> bytes:
        at = data.index(before) - 4
        return data[:at] + b"".join(chunks) + data[at:]

    late = chunk(b"eXIf", six)
    second = moving.index(b"fcTL", moving.index(b"IDAT"))
    pictures = {
        **{f"JPEG, {name}": (file("JPEG", exif=b"Exif\0\0" + tag), size) for name, (tag, size) in types.items()},
        **{f"WEBP, {name}": (file("WEBP", exif=tag), size) for name, (tag, size) in types.items()},
        **{f"PNG, {name}": (inserted(plain, b"IDAT", chunk(b"eXIf", tag)), size) for name, (tag, size) in types.items()},
        "PNG, behind the pixels": (inserted(plain, b"IEND", late), sideways),
        "PNG, behind the pixels, wrong checksum": (inserted(plain, b"IEND", late[:-1] + b"x"), sideways),
        "PNG, behind a broken chunk": (inserted(plain, b"IEND", chunk(b"e\x01If", b""), late), upright),
        "PNG, behind the end": (plain + late, upright),
        "PNG, in a second frame": (moving[: second + 34] + late + moving[second + 34 :], upright),
    }
    for name, (data, size) in pictures.items():
        yield Odd(f"orientation: {name}", triptych.MediaPart("image", data=data), size)


def timed() -> Iterator[Odd]:
    """Recordings and videos that are cut off or damaged."""
    chance = np.random.default_rng(11)
    for name in ("speech.mp3", "speech.m4a", "speech.aac", "speech.opus", "card.flac", "card_alac.mp4", "music.ogg", "band.mkv"):
        whole = (DATA / "media" / name).read_bytes()
        modality = "video" if name.startswith("band") else "audio"
        size = (176, 104) if modality == "video" else None
        damaged = bytearray(whole)
        for at in chance.integers(len(whole) // 3, 2 * len(whole) // 3, 60):
            damaged[at] ^= 0xFF
        yield Odd(f"{name}, damaged", triptych.MediaPart(modality, data=bytes(damaged)), size)
        if not name.endswith((".m4a", ".mp4")):  # their index is at the end
            yield Odd(f"{name}, cut off", triptych.MediaPart(modality, data=whole[: len(whole) // 2]), size)


FILES = [*from_files()]  # test_cases.py asks for them
ODD = [*turned(), *timed()]


SHOWN = [odd for odd in (*FILES, *ODD) if odd.size and odd.part.data and odd.part.modality == "image"]


@pytest.mark.parametrize("odd", SHOWN, ids=str)
def test_gateway_and_encoder_see_the_same_size(odd: Odd) -> None:
    facts = probe_image(odd.part.data, "image", max_pixels=50_000_000)
    shapes = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        shapes.append(shape)
        return np.empty(shape, dtype)

    decode_image(odd.part.data, ImageSpec(50_000_000), allocate)
    height, width, _ = shapes[-1]
    assert (facts.width, facts.height) == (width, height) == odd.size


async def check(client: triptych.AsyncClient, odd: Odd) -> None:
    """Ask about it; it must be answered as its header promised, or be refused for what it is."""
    try:
        estimate = await client.estimate([odd.part, "what?"])
        result = await client.chat([odd.part, "what?"], max_tokens=2)
    except triptych.errors.InvalidArgument as error:
        assert odd.refused is not None, f"{odd}: {error}"
        assert all(word in str(error) for word in odd.refused), f"{odd}: {error}"
        assert [path for path, _ in error.violations] == [f"messages[0].parts[0].{odd.part.modality}"], odd
        assert not SEEN_BY_NO_CLIENT.search(str(error)), f"{odd}: {error}"
    else:
        assert odd.refused is None, odd
        (media,) = estimate.media
        assert (media.width, media.height) == (odd.size or (None, None)), odd
        assert replace(result.usage.prompt_tokens_details, cached=0) == estimate.prompt_tokens_details, odd


def test_alone_and_beside_good_ones(start_stack: Callable[[str], RunningStack]) -> None:
    stack = start_stack("qwen2_5_omni_thinker")
    logged = {service: len(stack.events(service)) for service in SERVICES}
    good = next(odd.part for odd in FILES if odd.size == (26, 28))

    async def one_by_one_then_at_once() -> None:
        async with triptych.AsyncClient(stack.address, timeout=30) as client:
            expected = (await client.chat([good, "well?"], max_tokens=2)).token_ids

            async def ask_good() -> None:
                assert (await client.chat([good, "well?"], max_tokens=2)).token_ids == expected

            for odd in ODD:
                await check(client, odd)
                await client.chat("next", max_tokens=1)
            gate = asyncio.Semaphore(AT_ONCE)

            async def gated(call: Any) -> None:
                async with gate:
                    await call

            await asyncio.gather(*(gated(call) for odd in ODD for call in (check(client, odd), ask_good())))

    asyncio.run(one_by_one_then_at_once())
    stack.wait_until(lambda loads: not loads.busy())
    for service in SERVICES:
        events = stack.events(service)[logged[service] :]
        assert not [e for e in events if e["level"] == "error" or e.get("reason") == "ESTIMATE_MISMATCH"]
