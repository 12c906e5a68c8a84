"""What the plan of a recording or a video is made from, read by demuxing: nothing is decoded that packets tell."""

from __future__ import annotations

import numpy as np

from services.decoding.containers import frames_of, opened, packets
from services.decoding.packet_samples import PacketSamples
from services.decoding.refusals import Refused
from services.decoding.sound import resampled, sound_stream
from services.decoding.specs import Allocate, Facts, SoundFactsSpec, VideoFactsSpec
from services.decoding.video import picture_stream, read_timeline, shown_size


def read_sound(data: bytes, spec: SoundFactsSpec, allocate: Allocate) -> Facts:
    """How many samples ``decode_sound`` would yield. It is decoded for that only where packets do not tell their length: AAC
    whose frames have an odd one, headers of Vorbis or ALAC that are damaged.

    Raises:
        Refused: the bytes are no recording, it is empty, too long, or has a codec, a rate or channels that are not taken.
    """
    with opened(data, "AUDIO_UNREADABLE") as container:
        stream = sound_stream(container)
        rate, counter = stream.codec_context.sample_rate, PacketSamples(stream)
        total = 0
        for number, packet in enumerate(packets(container, stream)):
            if number > spec.max_packets:  # the last one is empty
                raise Refused("AUDIO_PACKETS", limit=spec.max_packets)
            if counter.known:
                total += counter.take(packet)
                continue
            total += sum(frame.samples for frame in frames_of(stream, packet))
            if resampled(total, rate, spec.rate) > spec.max_samples:
                break
    samples = resampled(total, rate, spec.rate)
    if not samples:
        raise Refused("AUDIO_EMPTY")
    if samples > spec.max_samples:
        raise Refused("AUDIO_TOO_LONG", limit=spec.max_samples, requested=samples, rate=spec.rate)
    allocate((1,), np.int64)[0] = samples
    return Facts()


def read_video(data: bytes, spec: VideoFactsSpec, allocate: Allocate) -> Facts:
    """When its frames are shown, as ``decode_video`` finds them, and how large they are.

    Raises:
        Refused: the bytes are no video, it has no frames, or more or larger ones than are taken.
    """
    with opened(data, "VIDEO_UNREADABLE") as container:
        stream = picture_stream(container)
        width, height = shown_size(container, stream, spec.max_pixels)
        timeline = read_timeline(container, stream, spec.max_packets)
    if not timeline.shown:
        raise Refused("VIDEO_EMPTY")
    allocate((len(timeline.shown),), np.float64)[...] = timeline.times
    return Facts(width=width, height=height, fps=timeline.fps)
