"""What a decoder is asked for and what comes of it. Plain data: it crosses a socket as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Allocate = Callable[[tuple[int, ...], type[np.generic]], Array]  # shape, element type; what the decoder fills


@dataclass(frozen=True)
class ImageSpec:
    """A picture, as uint8 [height, width, 3]. ``max_pixels`` is the largest width times height."""

    max_pixels: int

    kind = word = "image"
    dtype = np.uint8
    dimensions = 3

    @property
    def most_bytes(self) -> int:
        """Largest result."""
        return 3 * self.max_pixels


@dataclass(frozen=True)
class SoundSpec:
    """A recording in one channel, as float32 [samples].

    Attributes:
        max_samples: most that may come out; a recording that has more to be heard is refused.
        samples: how many are heard; what follows is not decoded. None: all.
        rate: samples a second.
    """

    max_samples: int
    samples: int | None = None
    rate: int = 16000

    kind = word = "audio"
    dtype = np.float32
    dimensions = 1

    @property
    def most_bytes(self) -> int:
        """Largest result."""
        return 4 * self.max_samples


@dataclass(frozen=True)
class VideoSpec:
    """Frames of a video, as uint8 [frames, height, width, 3].

    Attributes:
        frames: their indices in the order of showing; one may come twice.
        max_pixels: largest width times height of a frame.
        max_bytes: largest result.
    """

    frames: tuple[int, ...]
    max_pixels: int
    max_bytes: int

    kind = word = "video"
    dtype = np.uint8
    dimensions = 4

    @property
    def most_bytes(self) -> int:
        """Largest result."""
        return min(self.max_bytes, 3 * self.max_pixels * len(self.frames))


@dataclass(frozen=True)
class SoundFactsSpec:
    """How long a recording is, as int64 [1]: the samples that a :class:`SoundSpec` would yield.

    Attributes:
        max_samples: longest recording.
        max_packets: most packets that are read.
        rate: samples a second.
    """

    max_samples: int
    max_packets: int
    rate: int = 16000

    kind, word = "audio facts", "audio"
    dtype = np.int64
    dimensions = 1
    most_bytes = 8


@dataclass(frozen=True)
class VideoFactsSpec:
    """When the frames of a video are shown, as float64 [frames] in seconds from the first, ascending.

    Attributes:
        max_pixels: largest width times height of a frame.
        max_packets: most packets that are read.
    """

    max_pixels: int
    max_packets: int

    kind, word = "video facts", "video"
    dtype = np.float64
    dimensions = 1

    @property
    def most_bytes(self) -> int:
        """Largest result."""
        return 8 * self.max_packets


Spec = ImageSpec | SoundSpec | VideoSpec | SoundFactsSpec | VideoFactsSpec
_KINDS: dict[str, type[Spec]] = {kind.kind: kind for kind in (ImageSpec, SoundSpec, VideoSpec, SoundFactsSpec, VideoFactsSpec)}


def to_header(spec: Spec) -> dict[str, Any]:
    """As what JSON can hold."""
    return {"kind": spec.kind, **asdict(spec)}


def from_header(header: Mapping[str, Any]) -> Spec:
    """The other way round."""
    fields = dict(header)
    kind = _KINDS[fields.pop("kind")]
    if kind is VideoSpec:
        fields["frames"] = tuple(fields["frames"])
    return kind(**fields)


@dataclass(frozen=True)
class Facts:
    """What a decoder says besides the array that it filled.

    Attributes:
        times: of a video, when each frame is shown, in seconds from the first; of the frame that was taken where another
            one was asked for and is damaged.
        replaced: of a video, how many frames are such stand-ins.
        width, height: of a video whose facts are read, a frame in pixels, turned as a player shows it; else 0.
        fps: of such a video, frames a second, on average.
    """

    times: tuple[float, ...] = ()
    replaced: int = 0
    width: int = 0
    height: int = 0
    fps: float = 0.0


@dataclass(frozen=True)
class Decoded:
    """An item's pixels or samples, in memory that lives as long as ``array`` does, and what is known of them."""

    array: Array
    facts: Facts = Facts()

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self.array.nbytes)
