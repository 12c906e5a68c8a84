"""Files of sound and video, opened by what their bytes say and with listed formats and codecs only.

FFmpeg knows hundreds of both, and a file may name any: those that are not listed here are never run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.container import InputContainer

from services.decoding.refusals import Refused

_PCM = ("s16le", "s24le", "s32le", "u8", "f32le", "f64le", "alaw", "mulaw", "s16be", "s24be")
SOUND_CODECS = frozenset({"mp3", "aac", "flac", "alac", "opus", "vorbis", *(f"pcm_{form}" for form in _PCM)})
VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
_DECODERS = (*SOUND_CODECS, *VIDEO_CODECS, "mp3float", "libopus", "libvorbis", "libdav1d", "libvpx", "libvpx-vp9")
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")


def demuxer(data: bytes) -> str | None:
    """FFmpeg's name of the format that the first bytes show; a name or a declared type plays no part."""
    head = data[:12]
    if head[:4] in (b"RIFF", b"RF64"):
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12])
    if head[4:8] in _MOV_BOXES:
        return "mov"
    for magic, name in ((b"\x1aE\xdf\xa3", "matroska"), (b"OggS", "ogg"), (b"fLaC", "flac"), (b"ID3", "mp3")):
        if head.startswith(magic):
            return name
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # a frame of MPEG audio; layer 0 is AAC's
        return {0: "aac", 1: "mp3"}.get(head[1] >> 1 & 3)
    return None


def sound_codec(stream: Any) -> str | None:
    """FFmpeg's name of a stream's codec; None for one that is not listed here."""
    context = stream.codec_context
    name = None if context is None else context.codec.canonical_name
    return name if name in SOUND_CODECS else None


@contextmanager
def opened(data: bytes, unreadable: str) -> Iterator[InputContainer]:
    """The file, open.

    Args:
        data: the file.
        unreadable: code of the refusal where it cannot be read.
    """
    name = demuxer(data)
    if name is None:
        raise Refused(unreadable)
    options = {"codec_whitelist": ",".join(_DECODERS), "format_whitelist": name, "protocol_whitelist": "none"}
    try:
        container = av.open(
            io.BytesIO(data), "r", format=name, container_options=options, metadata_errors="ignore", io_open=_nothing_else
        )
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, OSError):
        raise Refused(unreadable) from None
    with container:
        yield container


def packets(container: InputContainer, stream: Any) -> Iterator[Any]:
    """The stream's packets; a file that breaks off ends there. The last one is empty: it asks the decoder for what it holds."""
    try:
        yield from container.demux(stream)
    except MemoryError:
        raise
    except av.FFmpegError:
        yield av.Packet()


def frames_of(stream: Any, packet: Any) -> list[Any]:
    """The frames that come of a packet; none where it does not decode."""
    try:
        frames: list[Any] = stream.codec_context.decode(packet if packet.size else None)
    except MemoryError:
        raise
    except av.FFmpegError:
        return []
    return frames


def decoded(container: InputContainer, stream: Any) -> Iterator[Any]:
    """The stream's frames in the order of showing, without those that do not decode."""
    for packet in packets(container, stream):
        yield from frames_of(stream, packet)


def _nothing_else(url: str, flags: int, options: object) -> Any:
    """A file that refers to another one gets none."""
    raise FileNotFoundError
