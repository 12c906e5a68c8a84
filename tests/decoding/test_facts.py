"""What is read of recordings and videos without decoding them is what decoding them gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoding import containers, facts, video
from services.decoding.facts import read_sound, read_video
from services.decoding.packet_samples import PacketSamples
from services.decoding.refusals import Refused
from services.decoding.sound import decode_sound
from services.decoding.specs import Facts, SoundFactsSpec, SoundSpec, VideoFactsSpec, VideoSpec
from services.decoding.video import decode_video
from services.decoding.vorbis import NoModes, VorbisBlocks
from tests.media_files import CASES, DATA, level, recording, sideways, tone
from tests.media_files import video as film

LONGEST, PACKETS, PIXELS = 10**8, 10**5, 10**7
SOUNDS = [  # container, codec, sample format, rate, whether every sample that goes in comes out
    ("wav", "pcm_s16le", "s16", 44100, True),
    ("wav", "pcm_mulaw", "s16", 8000, True),
    ("mov", "pcm_s24le", "s32", 48000, True),
    ("matroska", "pcm_s16le", "s16", 22050, True),
    ("mp3", "libmp3lame", "s16p", 44100, False),  # padding of more than a frame is not cut off
    ("mp3", "libmp3lame", "s16p", 22050, False),
    ("mp4", "libmp3lame", "s16p", 44100, False),
    ("ipod", "aac", "fltp", 44100, False),
    ("matroska", "aac", "fltp", 44100, False),
    ("adts", "aac", "fltp", 48000, False),
    ("flac", "flac", "s16", 44100, True),
    ("ogg", "flac", "s16", 44100, True),
    ("mp4", "flac", "s16", 48000, True),
    ("mp4", "alac", "s16p", 44100, True),
    ("ogg", "libopus", "s16", 48000, True),
    ("webm", "libopus", "s16", 48000, True),
    ("mp4", "libopus", "s16", 48000, False),
    ("ogg", "vorbis", "fltp", 44100, False),
    ("webm", "vorbis", "fltp", 44100, False),
]
VIDEOS = [
    ("mp4", "h264", {"bf": "3"}),  # an edit list makes up for the delay of reordered frames
    ("matroska", "h264", {"bf": "2"}),
    ("webm", "libvpx", {}),
    ("webm", "libvpx-vp9", {}),
    ("mp4", "libx265", {}),
    ("matroska", "libsvtav1", {}),
    ("avi", "mpeg4", {}),
    ("avi", "mjpeg", {}),
    ("mov", "mpeg4", {"bf": "2"}),
]


def filled(decode: Callable[[Any], Facts]) -> tuple[np.ndarray, Facts]:
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    found = decode(allocate)
    return arrays[-1], found


def samples(data: bytes) -> int:
    array, _ = filled(lambda allocate: read_sound(data, SoundFactsSpec(LONGEST, PACKETS), allocate))
    return int(array[0])


def heard(data: bytes) -> int:
    return len(filled(lambda allocate: decode_sound(data, SoundSpec(LONGEST), allocate))[0])


def clip(data: bytes, pixels: int = PIXELS, packets: int = PACKETS) -> tuple[list[float], Facts]:
    array, found = filled(lambda allocate: read_video(data, VideoFactsSpec(pixels, packets), allocate))
    return array.tolist(), found


def by_pyav(data: bytes) -> int:
    """As many samples as PyAV decodes, at 16,000 a second."""
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(audio=0))
    return -(-sum(frame.samples for frame in frames) * 16000 // frames[0].sample_rate)


def sound(kind: tuple[Any, ...], count: int, channels: int) -> bytes:
    container, codec, form, rate, _ = kind
    wave = tone(1.0, rate, channels)
    wave = np.tile(wave, (-(-count // len(wave)), 1))[:count]
    if form == "s32":
        out = io.BytesIO()
        with av.open(out, "w", format=container) as file:
            stream: Any = file.add_stream(codec, rate=rate, layout="stereo" if channels == 2 else "mono")
            packed = (wave * 2**30).astype(np.int32).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format="s32", layout="stereo" if channels == 2 else "mono")
            frame.rate = rate
            file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
        return out.getvalue()
    return recording(wave, rate, container, codec, form)


@pytest.mark.parametrize("kind", SOUNDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[3]}")
@settings(max_examples=12, deadline=None)
@given(count=st.integers(2000, 30000), channels=st.sampled_from([1, 2]))
def test_samples_are_those_that_decoding_gives(kind: tuple[Any, ...], count: int, channels: int) -> None:
    data = sound(kind, count, 2 if kind[1] == "vorbis" else channels)
    assert samples(data) == by_pyav(data) == heard(data)
    if kind[4]:
        assert samples(data) == -(-count * 16000 // kind[3])


def test_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(stream: Any, packet: Any) -> list[Any]:
        raise AssertionError("decoded")

    monkeypatch.setattr(facts, "frames_of", decode)
    monkeypatch.setattr(containers, "frames_of", decode)
    for kind in SOUNDS:
        assert samples(sound(kind, 5000, 2))
    for container, codec, options in VIDEOS:
        assert len(clip(film(9, container, codec, **options))[0]) == 9


@pytest.mark.parametrize("kind", SOUNDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{kind[3]}")
@pytest.mark.parametrize("cut", [False, True], ids=["damaged", "cut"])
def test_damage_does_not_part_them(kind: tuple[Any, ...], cut: bool) -> None:
    """What does not decode is silent in place; only where nothing decodes is there nothing."""
    chance = np.random.default_rng(7)
    whole = sound(kind, 20000, 2)
    for _ in range(25):
        data = bytearray(whole)
        if cut:
            data = data[: chance.integers(1, len(data))]
        else:
            for at in chance.integers(0, len(data), chance.integers(1, 8)):
                data[at] = chance.integers(256)
        try:
            expected = samples(bytes(data))
        except MemoryError:  # a length that was hit
            continue
        except Refused as refused:
            assert refused.code.startswith("AUDIO_")
            with pytest.raises(Refused, match=refused.code):
                heard(bytes(data))
            continue
        try:
            assert heard(bytes(data)) == expected
        except Refused as refused:
            assert refused.code in ("AUDIO_EMPTY", "AUDIO_NOT_FINITE")


RECORDINGS = [file for kind in ("card", "music", "speech") for file in sorted((DATA / "media").glob(f"{kind}*"))]


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.name)
def test_real_recordings(file: Path) -> None:
    data = file.read_bytes()
    assert samples(data) == by_pyav(data) == heard(data)


def test_vorbis_with_blocks_of_both_lengths() -> None:
    """As other encoders than FFmpeg's make it; each packet by itself."""
    with containers.opened((DATA / "media" / "music_cut.ogg").read_bytes(), "AUDIO_UNREADABLE") as container:
        stream = container.streams.audio[0]
        counter, counts = PacketSamples(stream), set()
        for packet in containers.packets(container, stream):
            expected = sum(frame.samples for frame in containers.frames_of(stream, packet))
            assert counter.take(packet) == expected
            counts.add(expected)
    assert counter.known and len(counts) >= 4


@pytest.mark.parametrize("headers", [b"", b"\x02", b"\x02\x1e\xff", b"\x02\x1e\x00" + b"\x01vorbis" * 9, b"\x01\x02\x03"])
def test_damaged_headers_of_vorbis(headers: bytes) -> None:
    with pytest.raises(NoModes):
        VorbisBlocks.of(headers)


def test_silence_stands_where_a_packet_does_not_decode() -> None:
    data = bytearray(recording(tone(1.0, 16000), 16000, "mp4", "alac", "s16p"))
    with av.open(io.BytesIO(bytes(data))) as file:
        start, size = [(packet.pos, packet.size) for packet in file.demux(audio=0)][1]
    data[start : start + size] = b"\xff" * size
    array, _ = filled(lambda allocate: decode_sound(bytes(data), SoundSpec(LONGEST), allocate))
    assert len(array) == samples(bytes(data)) == 16000
    assert not array[4096:8192].any()
    np.testing.assert_allclose(array[8192:], tone(1.0, 16000)[8192:, 0], atol=1e-4)


def test_limits_of_a_recording() -> None:
    data = recording(tone(1.0, 16000), 16000, "mp3", "libmp3lame", "s16p")
    for spec, code in ((SoundFactsSpec(15999, PACKETS), "AUDIO_TOO_LONG"), (SoundFactsSpec(LONGEST, 3), "AUDIO_PACKETS")):
        with pytest.raises(Refused, match=code) as refused:
            filled(lambda allocate, spec=spec: read_sound(data, spec, allocate))
        assert refused.value.figures["limit"] == (3 if code == "AUDIO_PACKETS" else 15999)
    assert refused.value.code == "AUDIO_PACKETS"
    vorbis = sound(SOUNDS[-1], 30000, 2)
    with pytest.raises(Refused, match="AUDIO_TOO_LONG"):
        filled(lambda allocate: read_sound(vorbis, SoundFactsSpec(1000, PACKETS), allocate))


def look(data: bytes, count: int) -> tuple[np.ndarray, Facts]:
    return filled(lambda allocate: decode_video(data, VideoSpec(tuple(range(count)), PIXELS, 10**9), allocate))


@pytest.mark.parametrize(("container", "codec", "options"), VIDEOS, ids=lambda value: str(value))
@pytest.mark.parametrize("count", [1, 2, 31])
def test_frames_are_those_that_decoding_gives(container: str, codec: str, options: dict[str, str], count: int) -> None:
    data = film(count, container, codec, size=(66, 48), **options)
    times, found = clip(data)
    frames, decoded = look(data, count)
    assert len(times) == count and times == list(decoded.times) and decoded.replaced == 0
    assert (found.height, found.width) == frames.shape[1:3] == (48, 66)
    if count > 2:
        assert found.fps == pytest.approx(25, rel=1e-3)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@settings(max_examples=15, deadline=None)
@given(gaps=st.lists(st.integers(20, 3000), min_size=1, max_size=12), quarters=st.integers(0, 3))
def test_an_uneven_rate_and_turns(container: str, gaps: list[int], quarters: int) -> None:
    stamps = np.cumsum([0, *gaps]) / 1000
    data = film(len(stamps), container, "h264", stamps.tolist(), bf="2")
    if container == "mp4":
        data = sideways(data, quarters)
    times, found = clip(data)
    frames, decoded = look(data, len(stamps))
    assert times == list(decoded.times) == pytest.approx(stamps.tolist(), abs=2e-3)
    assert found.fps == pytest.approx(len(gaps) / stamps[-1], rel=0.05)
    assert (found.height, found.width) == frames.shape[1:3]
    assert (found.width < found.height) == (container == "mp4" and quarters % 2 == 1)


@pytest.mark.parametrize("interval", ["1", "20"])
def test_an_edit_list_that_cuts_the_start_off(interval: str) -> None:
    """Five frames are there and not shown, where the others need them."""
    data = film(20, "mp4", "h264", [(index - 5) / 25 for index in range(20)], g=interval, bf="0")
    times, found = clip(data)
    frames, decoded = look(data, len(times))
    assert times == list(decoded.times) == pytest.approx([index / 25 for index in range(15)])
    assert found.fps == pytest.approx(25) and decoded.replaced == 0
    assert np.abs(np.median(frames[:, :, :, 0], axis=(1, 2)) - [level(index) for index in range(5, 20)]).max() <= 6


@pytest.mark.parametrize(("container", "codec", "options"), VIDEOS, ids=lambda value: str(value))
def test_damage_does_not_part_size_and_times(container: str, codec: str, options: dict[str, str]) -> None:
    chance = np.random.default_rng(3)
    whole = film(12, container, codec, g="4", **options)
    for _ in range(20):
        data = bytearray(whole)
        for at in chance.integers(0, len(data), 8):
            data[at] = chance.integers(256)
        try:
            times, found = clip(bytes(data))
            frames, decoded = look(bytes(data), len(times))
        except MemoryError:  # a length that was hit
            continue
        except Refused as refused:
            assert refused.code.startswith("VIDEO_") and refused.code != "VIDEO_SHORT"
            continue
        assert frames.shape == (len(times), found.height, found.width, 3)
        assert len(decoded.times) == len(times)


def test_a_cut_video() -> None:
    whole = film(50, "matroska", "h264", g="10")
    for share in (0.9, 0.7, 0.5):
        data = whole[: int(share * len(whole))]
        times, _ = clip(data)
        assert 0 < len(times) < 50 and times == list(look(data, len(times))[1].times)


def test_frames_of_another_size_than_the_first_are_scaled() -> None:
    """Two videos behind one another: the second one's frames are larger."""
    small, large = (film(8, "avi", "mjpeg", size=size) for size in ((32, 32), (64, 48)))
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file, av.open(io.BytesIO(small)) as one, av.open(io.BytesIO(large)) as other:
        stream = file.add_stream_from_template(one.streams.video[0])
        coded = [bytes(packet) for source in (one, other) for packet in source.demux(video=0) if packet.size]
        for index, data in enumerate(coded):
            packet = av.Packet(data)
            packet.pts = packet.dts = index
            packet.time_base, packet.stream, packet.is_keyframe = Fraction(1, 25), stream, True
            file.mux(packet)
    times, found = clip(out.getvalue())
    frames, decoded = look(out.getvalue(), 16)
    assert (found.width, found.height) == (32, 32) and frames.shape == (16, 32, 32, 3)
    assert times == list(decoded.times) and decoded.replaced == 0


def test_limits_of_a_video() -> None:
    data = film(9)
    with pytest.raises(Refused, match="VIDEO_TOO_LARGE") as large:
        clip(data, pixels=64 * 48 - 1)
    assert (large.value.figures["limit"], large.value.figures["requested"]) == (64 * 48 - 1, 64 * 48)
    with pytest.raises(Refused, match="VIDEO_PACKETS"):
        clip(data, packets=8)
    assert len(clip(data, pixels=64 * 48, packets=9)[0]) == 9


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] != "image"], ids=lambda case: case["file"])
def test_odd_files(case: dict[str, Any]) -> None:
    data = (DATA / case["file"]).read_bytes()
    try:
        if case["kind"] == "audio":
            assert samples(data) == heard(data) and abs(samples(data) - case["samples"]) <= case.get("within", 0)
        else:
            times, found = clip(data)
            assert [found.width, found.height] == case["size"] and len(times) == case["frames"]
            assert times == pytest.approx(case.get("times", times))
    except Refused as refused:
        assert refused.code == case["refused"]
    else:
        assert "refused" not in case


def test_the_level_of_ffmpeg_s_log_is_left_as_it_was() -> None:
    before = av.logging.get_level()
    clip(film(2))
    assert av.logging.get_level() == before
    assert video._MATRIX.search("Display Matrix: rotation of -90.00 degrees")
