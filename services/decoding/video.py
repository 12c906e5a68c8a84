"""Bytes of a video to the frames that a plan names. One frame is held at a time, besides the result."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.container import InputContainer

from services.decoding.containers import VIDEO_CODECS, decoded, opened, packets
from services.decoding.refusals import Refused
from services.decoding.specs import Allocate, Array, Facts, VideoSpec

_MATRIX = re.compile(r"Display Matrix: rotation of (-?\d+\.\d+) degrees")


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video are shown, read without decoding one.

    Attributes:
        shown: time stamps in the stream's unit, ascending; where the file has none, the frames' numbers.
        keys: those of frames that need no other.
        unit: seconds of one step.
        stamped: whether frames carry these stamps.
        fps: frames a second, on average.
    """

    shown: tuple[int, ...]
    keys: tuple[int, ...]
    unit: float
    stamped: bool
    fps: float

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds from the first frame."""
        return tuple((stamp - self.shown[0]) * self.unit for stamp in self.shown)


def read_timeline(container: InputContainer, stream: Any, max_packets: int | None = None) -> Timeline:
    """Read all packets; those that an edit list cuts off are not shown.

    Raises:
        Refused: there are more than ``max_packets``.
    """
    stamps, keys, count, stamped = [], [], 0, True
    for number, packet in enumerate(packets(container, stream)):
        if max_packets is not None and number > max_packets:  # the last one is empty
            raise Refused("VIDEO_PACKETS", limit=max_packets)
        if not packet.size or packet.is_discard:
            continue
        count += 1
        if packet.pts is None:
            stamped = False
            continue
        stamps.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    rate = stream.average_rate or Fraction(25)
    if not stamped:
        return Timeline(tuple(range(count)), (), float(1 / rate), False, float(rate))
    stamps.sort()
    span = (stamps[-1] - stamps[0]) * stream.time_base if stamps else 0
    fps = (count - 1) / span if span else rate
    return Timeline(tuple(stamps), tuple(sorted(keys)), float(stream.time_base), True, float(fps))


def picture_stream(container: InputContainer) -> Any:
    """The first stream of moving pictures; a cover of a song is none.

    Raises:
        Refused: there is none, or it has a codec that is not taken.
    """
    streams = [stream for stream in container.streams.video if not stream.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        raise Refused("VIDEO_MISSING")
    stream = streams[0]
    if stream.codec_context is None or stream.codec_context.codec.canonical_name not in VIDEO_CODECS:
        raise Refused("VIDEO_UNREADABLE")
    stream.codec_context.thread_count = 1
    return stream


def shown_size(container: InputContainer, stream: Any, max_pixels: int) -> tuple[int, int]:
    """Width and height of its frames as a player shows them, from the headers.

    Raises:
        Refused: they do not say it, or it is larger than ``max_pixels``.
    """
    context = stream.codec_context
    if not context.width or not context.height:
        raise Refused("VIDEO_UNREADABLE")
    _check_pixels(context.width, context.height, max_pixels)
    return (context.width, context.height) if _quarters(container, stream) % 2 == 0 else (context.height, context.width)


def _quarters(container: InputContainer, stream: Any) -> int:
    """Quarters of a turn in the stream's display matrix, which PyAV shows nowhere but in FFmpeg's own description of a file."""
    described: Any = container  # its types leave the method out
    before = av.logging.get_level()
    av.logging.set_level(av.logging.INFO)
    try:
        text = described.dumps_format()
    finally:
        av.logging.set_level(before)
    found = _MATRIX.search(text.partition(f"Stream #0:{stream.index}")[2].partition("Stream #0:")[0])
    return round(float(found[1]) / 90) if found else 0


def decode_video(data: bytes, spec: VideoSpec, allocate: Allocate) -> Facts:
    """The frames of ``spec.frames``, turned as a player shows them and of the size that the headers say; in place of a damaged
    one the good one nearest in time.

    Raises:
        Refused: the bytes are no video, it has no frame that decodes, fewer frames than planned, or ones that are too large.
    """
    with opened(data, "VIDEO_UNREADABLE") as container:
        stream = picture_stream(container)
        width, height = shown_size(container, stream, spec.max_pixels)
        timeline = read_timeline(container, stream)
    if not timeline.shown:
        raise Refused("VIDEO_EMPTY")
    if max(spec.frames) >= len(timeline.shown):
        raise Refused("VIDEO_SHORT", requested=max(spec.frames), limit=len(timeline.shown))
    with opened(data, "VIDEO_UNREADABLE") as container:
        reader = _Reader(container, picture_stream(container), timeline)
        out: Array | None = None
        times = [0.0] * len(spec.frames)
        replaced = 0
        for index in sorted(set(spec.frames)):
            stamp, frame = reader.nearest(timeline.shown[index])
            places = [place for place, wanted in enumerate(spec.frames) if wanted == index]
            replaced += len(places) * (stamp != timeline.shown[index])
            pixels = _pixels(frame, width, height, spec.max_pixels)
            if out is None:
                out = _room(pixels, spec, allocate)
            for place in places:
                out[place] = pixels
                times[place] = (stamp - timeline.shown[0]) * timeline.unit
    return Facts(tuple(times), replaced)


def _room(pixels: Array, spec: VideoSpec, allocate: Allocate) -> Array:
    needed = pixels.nbytes * len(spec.frames)
    if needed > spec.max_bytes:
        raise Refused("VIDEO_TOO_MUCH", requested=needed, limit=spec.max_bytes)
    return allocate((len(spec.frames), *pixels.shape), np.uint8)


def _pixels(frame: Any, width: int, height: int, max_pixels: int) -> Array:
    """uint8 [height, width, 3] of a frame, scaled where it is stored in another size."""
    _check_pixels(frame.width, frame.height, max_pixels)
    quarters = round(frame.rotation / 90) % 4  # counterclockwise
    width, height = (width, height) if quarters % 2 == 0 else (height, width)
    pixels: Array = np.rot90(frame.reformat(width=width, height=height, format="rgb24").to_ndarray(), quarters)
    return pixels


def _check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise Refused("VIDEO_TOO_LARGE", width=width, height=height, limit=limit, requested=width * height)


class _Reader:
    """Finds frames by their stamps, which must be asked for in ascending order; jumps over what nobody asks for."""

    def __init__(self, container: InputContainer, stream: Any, timeline: Timeline) -> None:
        self._container, self._stream, self._timeline = container, stream, timeline
        self._frames = self._stamped()
        self._at = timeline.shown[0]  # stamp of the frame that was read last
        self._before: tuple[int, Any] | None = None  # the last good frame at or before what was asked for
        self._after: tuple[int, Any] | None = None  # read, and later than what was asked for
        self._jumps = timeline.stamped

    def nearest(self, wanted: int) -> tuple[int, Any]:
        """The frame with this stamp, or the good one nearest to it; and its stamp."""
        jumped = self._jump(wanted)
        while True:
            found, self._after = self._after or next(self._frames, None), None
            if found is not None:
                self._at = found[0]
                if found[0] <= wanted:
                    self._before = found
                    if found[0] < wanted:
                        continue
                    return found
            if self._before is None and jumped:  # the jump missed, or led to damage: what is before it is needed
                self._restart()
                jumped = False
                continue
            self._after = found
            good = [frame for frame in (self._before, found) if frame is not None]
            if not good:
                raise Refused("VIDEO_EMPTY")
            return min(good, key=lambda frame: abs(frame[0] - wanted))

    def _jump(self, wanted: int) -> bool:
        keys = self._timeline.keys
        place = bisect_right(keys, wanted) - 1
        ahead = self._after[0] if self._after is not None else self._at
        if not self._jumps or place < 0 or keys[place] <= ahead:
            return False
        try:
            self._container.seek(keys[place], stream=self._stream)
        except MemoryError:
            raise
        except av.FFmpegError:
            self._jumps = False
            return False
        self._frames, self._before, self._after = self._stamped(), None, None
        return True

    def _restart(self) -> None:
        self._container.seek(self._timeline.shown[0], stream=self._stream)
        self._frames, self._jumps = self._stamped(), False

    def _stamped(self) -> Iterator[tuple[int, Any]]:
        """Good frames and their stamps."""
        for number, frame in enumerate(decoded(self._container, self._stream)):
            if not self._timeline.stamped:
                yield number, frame
            elif frame.pts is not None and not frame.is_corrupt:
                yield frame.pts, frame
