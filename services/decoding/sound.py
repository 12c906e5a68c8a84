"""Bytes of a recording to samples of one channel at one rate. What the header says of the length is not believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr
from av.container import InputContainer

from services.decoding.containers import frames_of, opened, packets, sound_codec
from services.decoding.packet_samples import PacketSamples
from services.decoding.refusals import Refused
from services.decoding.specs import Allocate, Array, Facts, SoundSpec

RATES = (4_000, 192_000)  # samples a second, least and most
MOST_CHANNELS = 8
_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "flt": 1.0, "dbl": 1.0}  # samples that make 1.0


def sound_stream(container: InputContainer) -> Any:
    """The first stream of sound.

    Raises:
        Refused: there is none, or its codec, rate or channels are not taken.
    """
    if not container.streams.audio:
        raise Refused("AUDIO_MISSING")
    stream = container.streams.audio[0]
    if sound_codec(stream) is None:
        raise Refused("AUDIO_UNREADABLE")
    context = stream.codec_context
    context.thread_count = 1
    least, most = RATES
    if not least <= context.sample_rate <= most:
        raise Refused("AUDIO_RATE", requested=context.sample_rate, least=least, limit=most)
    if context.channels > MOST_CHANNELS:
        raise Refused("AUDIO_CHANNELS", requested=context.channels, limit=MOST_CHANNELS)
    return stream


def resampled(samples: int, rate: int, wanted: int) -> int:
    """Samples at the wanted rate that become of those at another, as librosa has it."""
    return -(-samples * wanted // rate)


def decode_sound(data: bytes, spec: SoundSpec, allocate: Allocate) -> Facts:
    """The mean of the channels, resampled, up to what is heard; in place of packets that do not decode there is silence.

    A recording of ``n`` samples has ``ceil(n * spec.rate / rate)`` then, as many as its packets promised.

    Raises:
        Refused: the bytes are no recording, it is empty, too long, or has a rate, channels or samples that are not taken.
    """
    with opened(data, "AUDIO_UNREADABLE") as container:
        parts = _heard(container, sound_stream(container), spec)
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not samples.size:
        raise Refused("AUDIO_EMPTY")
    if not np.isfinite(samples).all():
        raise Refused("AUDIO_NOT_FINITE")
    allocate(samples.shape, np.float32)[...] = samples
    return Facts()


def _heard(container: InputContainer, stream: Any, spec: SoundSpec) -> list[Array]:
    """Resampled pieces, as many as are heard; none where nothing decodes."""
    most = spec.max_samples if spec.samples is None else spec.samples
    resample = _Resample(stream.codec_context.sample_rate, spec.rate)
    promised = PacketSamples(stream)
    parts: list[Array] = []
    decodes = False
    for packet in packets(container, stream):
        pieces = []
        for frame in frames_of(stream, packet):
            if frame.sample_rate != resample.rate:
                raise Refused("AUDIO_UNREADABLE")
            pieces.append(_mono(frame))
        decodes = decodes or bool(pieces)
        samples = np.concatenate(pieces) if pieces else np.empty(0, np.float32)
        parts.append(resample(_of_length(samples, promised.take(packet)) if promised.known else samples))
        if resample.given > most and decodes:
            break
    else:
        parts.append(resample.rest())
    if not decodes:
        return []
    excess = resample.given - most
    if excess > 0:
        if spec.samples is None:
            raise Refused("AUDIO_TOO_LONG", limit=spec.max_samples, rate=spec.rate)
        while excess >= len(parts[-1]):  # the last piece alone may be shorter than what is too much
            excess -= len(parts.pop())
        parts[-1] = parts[-1][: len(parts[-1]) - excess]
    return parts


def _of_length(samples: Array, length: int) -> Array:
    """The same, cut or with silence behind it."""
    return samples[:length] if len(samples) >= length else np.pad(samples, (0, length - len(samples)))


def _mono(frame: Any) -> Array:
    """float32 [samples] of a frame of any layout and sample format."""
    channels = frame.layout.nb_channels
    if channels > MOST_CHANNELS:
        raise Refused("AUDIO_CHANNELS", requested=channels, limit=MOST_CHANNELS)
    name = frame.format.name.removesuffix("p")
    if name not in _SCALES:
        raise Refused("AUDIO_UNREADABLE")
    samples = frame.to_ndarray()  # [channels, samples] where planar, else [1, samples * channels]
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    samples = samples.astype(np.float32) - (128 if name == "u8" else 0)
    mean: Array = samples.mean(axis=0, dtype=np.float32)
    return mean / np.float32(_SCALES[name])


class _Resample:
    """Samples at one rate in, at another out, piece by piece.

    Attributes:
        rate: of what comes in.
        given: samples that came out.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        self.rate, self.given = rate, 0
        self._wanted, self._taken = wanted, 0
        self._stream = None if rate == wanted else soxr.ResampleStream(rate, wanted, 1, dtype=np.float32, quality=soxr.HQ)

    def __call__(self, samples: Array) -> Array:
        self._taken += len(samples)
        out = samples if self._stream is None else self._stream.resample_chunk(samples)
        self.given += len(out)
        return out

    def rest(self) -> Array:
        """What is still inside, so that there are ``ceil(taken * wanted / rate)`` in all."""
        missing = resampled(self._taken, self.rate, self._wanted) - self.given
        out = np.zeros(missing, np.float32)
        if self._stream is not None:
            tail = self._stream.resample_chunk(np.empty(0, np.float32), last=True)[:missing]
            out[: len(tail)] = tail
        self.given += missing
        return out
