"""Seeded requests in OpenAI's spelling, which every server and our own SDK take. The same seed makes the same requests."""

from __future__ import annotations

import base64
import io
import random
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from PIL import Image

Part = dict[str, Any]
COLD, WARM = "repeated, first time", "repeated, again"  # kinds of the workload "repeated"
_WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "copper",
    "engine",
    "letter",
    "winter",
    "forest",
    "market",
    "signal",
    "bridge",
    "harbour",
    "candle",
    "mirror",
    "thunder",
    "ladder",
    "orchard",
    "pepper",
    "velvet",
    "anchor",
    "basket",
    "compass",
    "desert",
    "feather",
]


@dataclass(frozen=True)
class Job:
    """One conversation: each turn is sent with the turns before it and their answers.

    Attributes:
        kind: what its figures are grouped by.
        turns: the user's turns, as lists of parts.
        max_tokens: tokens of each answer, whatever they are.
    """

    kind: str
    turns: tuple[tuple[Part, ...], ...]
    max_tokens: int


@dataclass(frozen=True)
class Sizes:
    """How large things are: words of a text, pixels of a picture, seconds of sound and video, tokens of an answer."""

    words: int = 60
    width: int = 640
    height: int = 427
    seconds: float = 3.0
    max_tokens: int = 32


def text_only(rng: random.Random, sizes: Sizes) -> Job:
    """One turn of text."""
    return Job("text", ((_text(rng, sizes.words),),), sizes.max_tokens)


def one_image(rng: random.Random, sizes: Sizes) -> Job:
    """A picture of its own, and a short question."""
    return Job("image", ((picture(rng, sizes), _text(rng, 10)),), sizes.max_tokens)


def one_sound(rng: random.Random, sizes: Sizes) -> Job:
    """A recording, and a short question."""
    return Job("audio", ((sound(rng, sizes), _text(rng, 10)),), sizes.max_tokens)


def one_video(rng: random.Random, sizes: Sizes) -> Job:
    """A video, and a short question."""
    return Job("video", ((video(rng, sizes), _text(rng, 10)),), sizes.max_tokens)


def mixed(rng: random.Random, sizes: Sizes) -> Job:
    """60 % text, 25 % a picture, 10 % a recording, 5 % a video."""
    make = rng.choices((text_only, one_image, one_sound, one_video), (60, 25, 10, 5))[0]
    return make(rng, sizes)


def multi_turn(rng: random.Random, sizes: Sizes) -> Job:
    """A picture, then three questions about it, each sent with all that came before."""
    return Job("multi-turn", ((picture(rng, sizes), _text(rng, 10)), (_text(rng, 10),), (_text(rng, 10),)), sizes.max_tokens)


def make_jobs(workload: str, count: int, seed: int, sizes: Sizes) -> list[Job]:
    """So many conversations.

    Args:
        workload: one of :data:`WORKLOADS`.
        count: how many.
        seed: the same makes the same.
        sizes: how large.
    """
    rng = random.Random(f"{workload} {seed}")
    if workload == "repeated":  # few pictures, and always another question about one of them
        shown = [picture(rng, sizes) for _ in range(max(1, count // 4))]
        times = [COLD if i < len(shown) else WARM for i in range(count)]
        return [Job(kind, ((shown[i % len(shown)], _text(rng, 10)),), sizes.max_tokens) for i, kind in enumerate(times)]
    return [WORKLOADS[workload](rng, sizes) for _ in range(count)]


WORKLOADS: dict[str, Callable[[random.Random, Sizes], Job]] = {
    "text": text_only,
    "image": one_image,
    "audio": one_sound,
    "video": one_video,
    "mixed": mixed,
    "repeated": one_image,
    "multi-turn": multi_turn,
}


def picture(rng: random.Random, sizes: Sizes) -> Part:
    """A JPEG that compresses like a photo: smooth, with some grain."""
    file = io.BytesIO()
    Image.fromarray(_scene(rng, sizes.width, sizes.height)).save(file, "JPEG", quality=88)
    return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", file.getvalue())}}


def sound(rng: random.Random, sizes: Sizes) -> Part:
    """A WAV at 16 kHz: a tone that glides, with noise."""
    noise = np.random.default_rng(rng.getrandbits(32))
    time = np.arange(int(16000 * sizes.seconds)) / 16000
    wanted = 0.4 * np.sin(2 * np.pi * (200 + 150 * time) * time) + 0.05 * noise.standard_normal(len(time))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes((np.clip(wanted, -1, 1) * 32767).astype("<i2").tobytes())
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def video(rng: random.Random, sizes: Sizes) -> Part:
    """An MP4 of 8 frames a second over which a scene moves sideways."""
    width, height = sizes.width // 4 * 2, sizes.height // 4 * 2
    scene = _scene(rng, 2 * width, height)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frames = int(8 * sizes.seconds)
        for i in range(frames):
            left = i * width // frames
            shown = np.ascontiguousarray(scene[:, left : left + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", file.getvalue())}}


def _scene(rng: random.Random, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 ``[height, width, 3]``."""
    noise = np.random.default_rng(rng.getrandbits(32))
    coarse = Image.fromarray(noise.integers(0, 256, (9, 12, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(coarse) + noise.normal(0, 6, (height, width, 1)), 0, 255).astype(np.uint8)


def _text(rng: random.Random, words: int) -> Part:
    return {"type": "text", "text": " ".join(rng.choices(_WORDS, k=words))}


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
