"""Bytes of a video to the frames that a plan names. One frame is held at a time, besides the result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.container import InputContainer

from services.decoding.containers import VIDEO_CODECS, decoded, opened, packets
from services.decoding.refusals import Refused
from services.decoding.specs import Allocate, Array, Facts, VideoSpec


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video are shown, read without decoding one.

    Attributes:
        shown: time stamps in the stream's unit, ascending; where the file has none, the frames' numbers.
        keys: those of frames that need no other.
        unit: seconds of one step.
        stamped: whether frames carry these stamps.
    """

    shown: tuple[int, ...]
    keys: tuple[int, ...]
    unit: float
    stamped: bool

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds from the first frame."""
        return tuple((stamp - self.shown[0]) * self.unit for stamp in self.shown)


def read_timeline(container: InputContainer, stream: Any) -> Timeline:
    """Read all packets; those that an edit list cuts off are not shown."""
    stamps, keys, count, stamped = [], [], 0, True
    for packet in packets(container, stream):
        if not packet.size or packet.is_discard:
            continue
        count += 1
        if packet.pts is None:
            stamped = False
            continue
        stamps.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    if stamped:
        return Timeline(tuple(sorted(stamps)), tuple(sorted(keys)), float(stream.time_base), True)
    return Timeline(tuple(range(count)), (), 1 / float(stream.average_rate or 25), False)


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


def decode_video(data: bytes, spec: VideoSpec, allocate: Allocate) -> Facts:
    """The frames of ``spec.frames``, turned as a player shows them; in place of a damaged one the good one nearest in time.

    Raises:
        Refused: the bytes are no video, it has no frame that decodes, fewer frames than planned, or ones that are too large.
    """
    with opened(data, "VIDEO_UNREADABLE") as container:
        timeline = read_timeline(container, picture_stream(container))
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
            pixels = _pixels(frame, spec, None if out is None else (out.shape[1], out.shape[2]))
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


def _pixels(frame: Any, spec: VideoSpec, size: tuple[int, int] | None) -> Array:
    """uint8 [height, width, 3] of a frame; scaled to ``size`` where the video changes its size on the way."""
    if frame.width * frame.height > spec.max_pixels:
        raise Refused(
            "VIDEO_TOO_LARGE", width=frame.width, height=frame.height, limit=spec.max_pixels,
            requested=frame.width * frame.height,
        )  # fmt: skip
    quarters = round(frame.rotation / 90) % 4  # counterclockwise
    height, width = (frame.height, frame.width) if size is None else (size if quarters % 2 == 0 else size[::-1])
    pixels: Array = np.rot90(frame.reformat(width=width, height=height, format="rgb24").to_ndarray(), quarters)
    return pixels


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
