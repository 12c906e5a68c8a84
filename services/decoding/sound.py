"""Bytes of a recording to samples of one channel at one rate. What the header says of the length is not believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr

from services.decoding.containers import SOUND_CODECS, decoded, opened
from services.decoding.refusals import Refused
from services.decoding.specs import Allocate, Array, Facts, SoundSpec

RATES = (4_000, 192_000)  # samples a second, least and most
MOST_CHANNELS = 8
_SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "flt": 1.0, "dbl": 1.0}  # samples that make 1.0


def decode_sound(data: bytes, spec: SoundSpec, allocate: Allocate) -> Facts:
    """The mean of the channels, resampled, up to what is heard.

    A recording of ``n`` samples has ``ceil(n * spec.rate / rate)`` then, as librosa has it.

    Raises:
        Refused: the bytes are no recording, it is empty, too long, or has a rate, channels or samples that are not taken.
    """
    with opened(data, "AUDIO_UNREADABLE") as container:
        if not container.streams.audio:
            raise Refused("AUDIO_MISSING")
        stream = container.streams.audio[0]
        if stream.codec_context is None or stream.codec_context.codec.canonical_name not in SOUND_CODECS:
            raise Refused("AUDIO_UNREADABLE")
        stream.codec_context.thread_count = 1
        parts = _heard(container, stream, spec)
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not samples.size:
        raise Refused("AUDIO_EMPTY")
    if not np.isfinite(samples).all():
        raise Refused("AUDIO_NOT_FINITE")
    allocate(samples.shape, np.float32)[...] = samples
    return Facts()


def _heard(container: Any, stream: Any, spec: SoundSpec) -> list[Array]:
    """Resampled pieces, as many as are heard."""
    most = spec.max_samples if spec.samples is None else spec.samples
    parts: list[Array] = []
    resample: _Resample | None = None
    for frame in decoded(container, stream):
        if resample is None:
            resample = _Resample(_checked_rate(frame), spec.rate)
        if frame.sample_rate != resample.rate:
            raise Refused("AUDIO_UNREADABLE")
        parts.append(resample(_mono(frame)))
        if resample.given > most:
            break
    else:
        if resample is not None:
            parts.append(resample.rest())
    excess = 0 if resample is None else resample.given - most
    if excess > 0:
        if spec.samples is None:
            raise Refused("AUDIO_TOO_LONG", limit=spec.max_samples, rate=spec.rate)
        while excess >= len(parts[-1]):  # the last piece alone may be shorter than what is too much
            excess -= len(parts.pop())
        parts[-1] = parts[-1][: len(parts[-1]) - excess]
    return parts


def _checked_rate(frame: Any) -> int:
    rate, (least, most) = frame.sample_rate, RATES
    if not least <= rate <= most:
        raise Refused("AUDIO_RATE", requested=rate, least=least, limit=most)
    return int(rate)


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
        missing = -(-self._taken * self._wanted // self.rate) - self.given
        out = np.zeros(missing, np.float32)
        if self._stream is not None:
            tail = self._stream.resample_chunk(np.empty(0, np.float32), last=True)[:missing]
            out[: len(tail)] = tail
        self.given += missing
        return out
