"""How many samples each packet of a recording decodes to, from its first bytes and what the container says of it.

No sample is decoded. What a container or a header says of the whole length plays no part: only packets that are there count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from services.decoding.containers import sound_codec
from services.decoding.vorbis import NoModes, VorbisBlocks

_PCM_BYTES = {"s16": 2, "s24": 3, "s32": 4, "u8": 1, "f32": 4, "f64": 8, "alaw": 1, "mulaw": 1}
_AAC_FRAMES = (1024, 960, 2048, 1920)  # the longer ones where a band above is made up (HE-AAC)
_FLAC_SIZES = {1: 192, **{code: 576 << code - 2 for code in range(2, 6)}, **{code: 256 << code - 8 for code in range(8, 16)}}
_OPUS_MOST = 5760  # 120 ms; a packet of more is damaged
_ALAC_MOST = 16  # bytes of its header up to the end of the size of a frame
_SKIP = struct.Struct("<II")

Samples = Callable[[bytes], int]


class PacketSamples:
    """Counts the samples of a stream's packets, as ``discard_samples`` in libavcodec's ``decode.c`` lets them through.

    Attributes:
        known: whether this codec's packets tell; where headers are too odd for that, the stream must be decoded.
    """

    def __init__(self, stream: Any) -> None:
        self._samples = _codec(stream)
        self._skip = 0
        self.known = self._samples is not None

    def take(self, packet: Any) -> int:
        """Samples that come of a packet once what precedes and follows the sound is cut off; damaged or not."""
        assert self._samples is not None, "these packets do not tell"
        if not packet.size:
            return 0
        samples, padding = self._samples(bytes(packet)), 0
        if not samples:
            return 0
        if packet.has_sidedata("skip_samples"):
            self._skip, padding = _SKIP.unpack_from(bytes(packet.get_sidedata("skip_samples")))
        skipped = samples if packet.is_discard else min(samples, self._skip)
        self._skip = max(0, self._skip - samples) if packet.is_discard else self._skip - skipped
        left = samples - skipped
        return left - padding if padding <= left else left


def _codec(stream: Any) -> Samples | None:
    context = stream.codec_context
    name = sound_codec(stream) or ""
    if name == "mp3":
        return _mp3
    if name == "flac":
        return _flac
    if name == "opus":
        return _opus
    if name == "vorbis":
        try:
            return VorbisBlocks.of(bytes(context.extradata or b"")).samples
        except NoModes:
            return None
    if name == "alac" and len(extra := bytes(context.extradata or b"")) >= _ALAC_MOST:
        most = int.from_bytes(extra[_ALAC_MOST - 4 : _ALAC_MOST], "big")
        return lambda data: _alac(data, most)
    if name == "aac" and context.frame_size in _AAC_FRAMES:
        frame = int(context.frame_size)
        return lambda data: frame
    form = name.removeprefix("pcm_").removesuffix("le").removesuffix("be")
    if form in _PCM_BYTES and context.channels:
        together = _PCM_BYTES[form] * context.channels
        return lambda data: len(data) // together
    return None


def _mp3(data: bytes) -> int:
    """Layer III: two granules of 576 samples, in MPEG 2 and 2.5 one."""
    return 1152 if len(data) > 1 and data[1] & 0x18 == 0x18 else 576


def _flac(data: bytes) -> int:
    """RFC 9639, section 9.1: the block size in a frame's header, coded or behind the frame's number; 0 where it is damaged."""
    if len(data) < 6:
        return 0
    block, rate = data[2] >> 4, data[2] & 15
    number = 4 + max(1, 8 - (~data[4] & 0xFF).bit_length())  # where it ends, written as UTF-8 is
    size = number + {6: 1, 7: 2}.get(block, 0)
    end = size + {12: 1, 13: 2, 14: 2}.get(rate, 0) + 1  # with the header's own checksum
    if data[0] != 0xFF or data[1] & 0xFC != 0xF8 or _crc8(data[:end]):
        return 0
    return int.from_bytes(data[number:size], "big") + 1 if size > number else _FLAC_SIZES.get(block, 0)


def _crc8(data: bytes) -> int:
    """0 where the last byte is the checksum of those before."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value << 1 & 0xFF ^ (7 if value & 0x80 else 0)
    return value


def _opus(data: bytes) -> int:
    """RFC 6716, section 3.1: how long a frame is and how many there are; always at 48,000 a second."""
    config, count = data[0] >> 3, data[0] & 3
    if config < 12:
        frame = (480, 960, 1920, 2880)[config & 3]
    elif config < 16:
        frame = (480, 960)[config & 1]
    else:
        frame = (120, 240, 480, 960)[config & 3]
    frames = (data[1] & 63 if len(data) > 1 else 0) if count == 3 else min(count + 1, 2)
    samples = frame * frames
    return samples if samples <= _OPUS_MOST else 0


def _alac(data: bytes, most: int) -> int:
    """Frames are of one size but for the last, whose own size is written in it."""
    head = int.from_bytes(data[:7].ljust(7, b"\0"), "big")  # 3 + 4 + 12 bits, whether a size follows, 3 bits, the size
    stated = head >> 36 & 1
    size = head >> 1 & 0xFFFFFFFF
    return size if stated and size <= most else most
