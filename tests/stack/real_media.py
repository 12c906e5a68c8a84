"""Real pictures, recordings and videos as files, and what the oracle hears and sees of them: as they are decoded here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from services.decoding.facts import read_video
from services.decoding.sound import decode_sound
from services.decoding.specs import SoundSpec, VideoFactsSpec, VideoSpec
from services.decoding.video import decode_video
from services.models import media
from services.models.checkpoint import Checkpoint
from services.models.media import Modality
from tests.media_files import DATA
from tests.oracle import Takes
from tests.reference import Ask, Clip, Part, Sound

FILES = {path.name: path.read_bytes() for path in sorted((DATA / "media").iterdir()) if path.suffix != ".md"}
VIDEOS = [name for name in FILES if name.startswith("band")]
PHOTOS = [name for name in FILES if name.startswith("photo")]
RECORDINGS = [name for name in FILES if not name.startswith(("band", "photo"))]
_ROOM = 10**9


@dataclass(frozen=True)
class RecordingFile(Sound):
    """A recording in a file of any format, which ``wav`` holds."""

    @property
    def samples(self) -> np.ndarray:
        array, _ = _decoded(lambda allocate: decode_sound(self.wav, SoundSpec(_ROOM), allocate))
        return array


@dataclass(frozen=True, eq=False)
class VideoFile(Clip):
    """A video in a file, and as the frames of it that are looked at.

    Attributes:
        file: its bytes.
        shown: what a processor is told of those frames.
    """

    file: bytes
    shown: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return self.shown


def video_file(data: bytes, checkpoint: Checkpoint) -> VideoFile:
    """The frames that the checkpoint's own sampling takes."""
    times, facts = _decoded(lambda allocate: read_video(data, VideoFactsSpec(_ROOM, _ROOM), allocate))
    clip = media.Clip(facts.width, facts.height, len(times), facts.fps, tuple(times.tolist()))
    (plan,) = checkpoint.plan([clip])
    frames, _ = _decoded(lambda allocate: decode_video(data, VideoSpec(plan.frames, _ROOM, _ROOM), allocate))
    shown = dict(fps=facts.fps, total_num_frames=len(times), frames_indices=list(plan.frames))
    even = np.allclose(np.array(plan.frames) / facts.fps, plan.times, atol=1e-9)
    if checkpoint.family.model_type == "qwen3_vl" and not even:  # it writes times, and makes them of indices
        shown = dict(fps=1000.0, total_num_frames=len(times), frames_indices=[round(1000 * time) for time in plan.times])
    return VideoFile(frames, facts.fps, data, shown)


def media_asks(checkpoint: Checkpoint, takes: Takes, picture: bytes, photos_at_most: int = len(PHOTOS)) -> list[Ask]:
    """Every file alone, then some beside each other and beside a picture, as far as the family takes them.

    Of photos as many as are wanted, other ones for each family.
    """
    recordings: list[Part] = []
    photos: list[Part] = []
    if Modality.IMAGE in checkpoint.family.modalities:
        names = Random(checkpoint.family.model_type).sample(PHOTOS, photos_at_most)
        photos = [FILES[name] for name in names]
    videos: list[Part] = []
    if Modality.AUDIO in checkpoint.family.modalities:
        recordings = [RecordingFile(FILES[name]) for name in RECORDINGS]
    if Modality.VIDEO in checkpoint.family.modalities:
        videos = [video_file(FILES[name], checkpoint) for name in VIDEOS]
    asks = [Ask([("user", [item, "what is this ?"])]) for item in (*photos, *recordings, *videos)]
    if takes.items > 1 and (recordings or videos):
        some = [*recordings[:2], *videos[:1], *([picture] if takes.modalities[0] is Modality.IMAGE else [])]
        asks.append(
            Ask([("user", ["which", *some, "?"]), ("assistant", ["yes ?"]), ("user", [*recordings[2:3], *videos[2:3], "and"])])
        )
    return asks


def _decoded(decode: Callable[[Any], Any]) -> tuple[np.ndarray, Any]:
    """What a decoder fills, and what it says."""
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    facts = decode(allocate)
    return arrays[-1], facts
