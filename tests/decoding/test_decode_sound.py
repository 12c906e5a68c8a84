"""Recordings against librosa's conventions: mean of the channels, ceil(samples * 16000 / rate) samples."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
import soxr

from services.decoding.refusals import Refused
from services.decoding.sound import decode_sound
from services.decoding.specs import SoundSpec
from tests.media_files import recording, tone

SECONDS = 16000


def heard(data: bytes, samples: int | None = None, most: int = 60 * SECONDS) -> np.ndarray:
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    decode_sound(data, SoundSpec(most, samples), allocate)
    return arrays[-1]


def wav(samples: np.ndarray, rate: int) -> bytes:
    """16-bit WAV of int16 [samples, channels]."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((samples.shape[1], 2, rate, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    return out.getvalue()


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000])
@pytest.mark.parametrize("count", [1, 7, 4801])
def test_a_wav_is_what_soxr_makes_of_the_mean_of_its_channels(rate: int, count: int) -> None:
    samples = np.random.default_rng(rate).integers(-20000, 20000, (count, 2), dtype=np.int16)
    mono = samples.astype(np.float32).mean(axis=1) / 32768
    expected = np.zeros(-(-count * 16000 // rate), np.float32)
    whole = soxr.resample(mono, rate, 16000, soxr.HQ)[: len(expected)] if rate != 16000 else mono
    expected[: len(whole)] = whole
    np.testing.assert_allclose(heard(wav(samples, rate)), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("container", "codec", "form", "rate"),
    [
        ("mp3", "libmp3lame", "s16p", 44100),
        ("ipod", "aac", "fltp", 44100),
        ("adts", "aac", "fltp", 48000),
        ("flac", "flac", "s16", 44100),
        ("ogg", "vorbis", "fltp", 44100),
        ("ogg", "libopus", "s16", 48000),
        ("webm", "libopus", "s16", 48000),
        ("wav", "pcm_s16le", "s16", 44100),
        ("mp4", "alac", "s16p", 44100),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_containers_and_codecs(container: str, codec: str, form: str, rate: int, channels: int) -> None:
    if codec == "vorbis" and channels == 1:
        pytest.skip("FFmpeg's own encoder makes stereo only")
    samples = heard(recording(tone(1.0, rate, channels), rate, container, codec, form))
    assert abs(len(samples) - 16000) < 1600
    middle = samples[4000:12000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert np.argmax(spectrum) * 16000 / len(middle) == pytest.approx(440, abs=2.5)
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.5 / 2**0.5, rel=0.08)


def test_only_what_is_heard_comes_out_and_nothing_after_it_is_decoded() -> None:
    data = wav((tone(3.0, 44100) * 32767).astype(np.int16), 44100)
    whole = heard(data)
    assert len(whole) == 48000
    np.testing.assert_array_equal(heard(data, 12345), whole[:12345])
    assert len(heard(data, 50000)) == 48000  # no more than there is
    np.testing.assert_array_equal(heard(data[: len(data) // 2], 12345), whole[:12345])


def test_a_longer_recording_than_allowed_is_refused() -> None:
    data = wav(np.zeros((16001, 1), np.int16), 16000)
    with pytest.raises(Refused, match="AUDIO_TOO_LONG"):
        heard(data, most=16000)
    assert len(heard(data, 16000, most=16000)) == 16000


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = tone(0.1, 16000)
    samples[77] = value
    head = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x03\0\x01\0\x80\x3e\0\0\0\xfa\0\0\x04\0\x20\0data"
    with pytest.raises(Refused, match="AUDIO_NOT_FINITE"):
        heard(head + (4 * len(samples)).to_bytes(4, "little") + samples.tobytes())


@pytest.mark.parametrize("data", [b"", b"RIFF", b"no sound at all", b"\0" * 999, b"ID3" + b"\0" * 99, b"OggS" * 40, b"fLaC"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="AUDIO_"):
        heard(data)


def test_damage_costs_what_is_damaged() -> None:
    data = bytearray(recording(tone(2.0, 44100), 44100, "mp3", "libmp3lame", "s16p"))
    data[len(data) // 2 : len(data) // 2 + 600] = b"\0" * 600
    assert 24000 < len(heard(bytes(data))) <= 33000
