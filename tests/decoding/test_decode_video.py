"""Frames by their place in the order of showing, whatever the container, the rate and the damage."""

from __future__ import annotations

import numpy as np
import pytest

from services.decoding.refusals import Refused
from services.decoding.specs import Facts, VideoSpec
from services.decoding.video import decode_video
from tests.media_files import coded, level, sideways, video, white_corner

FORMATS = [
    ("mp4", "h264"),
    ("matroska", "h264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("mp4", "libx265"),
    ("matroska", "libsvtav1"),
    ("avi", "mpeg4"),
    ("avi", "mjpeg"),
    ("mov", "mpeg4"),
]


def look(data: bytes, *frames: int, pixels: int = 10**6, most: int = 10**8) -> tuple[np.ndarray, Facts]:
    arrays = []

    def allocate(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        arrays.append(np.empty(shape, dtype))
        return arrays[-1]

    facts = decode_video(data, VideoSpec(frames, pixels, most), allocate)
    return arrays[-1], facts


def levels(frames: np.ndarray) -> list[int]:
    """Each frame's brightness."""
    return [int(value) for value in np.median(frames.reshape(len(frames), -1), axis=1)]


def near(frames: np.ndarray, wanted: list[int]) -> bool:
    return bool(np.abs(np.subtract(levels(frames), [level(index) for index in wanted])).max() <= 6)


@pytest.mark.parametrize(("container", "codec"), FORMATS)
@pytest.mark.parametrize("wanted", [list(range(60)), [0, 3, 3, 17, 31, 59], [59], [58, 2, 30]])
def test_the_frames_that_are_asked_for(container: str, codec: str, wanted: list[int]) -> None:
    frames, facts = look(video(60, container, codec, g="12"), *wanted)
    assert frames.shape == (len(wanted), 48, 64, 3) and frames.dtype == np.uint8
    assert near(frames, wanted)
    assert facts.times == pytest.approx([index / 25 for index in wanted], abs=2e-3) and facts.replaced == 0


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_an_uneven_rate_and_reordered_frames(container: str) -> None:
    times = [0, 0.1, 0.2, 1, 2, 3, 3.04, 7, 7.5, 9]
    data = video(10, container, "h264", times, bf="3", g="5")
    frames, facts = look(data, *range(10))
    assert near(frames, list(range(10)))
    assert facts.times == pytest.approx(times, abs=2e-3)


@pytest.mark.parametrize(("quarters", "corner"), [(0, (0, 0)), (1, (0, -1)), (2, (-1, -1)), (3, (-1, 0))])
def test_it_is_turned_as_a_player_shows_it(quarters: int, corner: tuple[int, int]) -> None:
    data = sideways(white_corner(), quarters)
    frames, _ = look(data, 0)
    assert frames.shape[1:3] == ((48, 64) if quarters % 2 == 0 else (64, 48))
    inner = frames[0, 4:-4, 4:-4, 0]
    assert [bool(inner[place] > 128) for place in ((0, 0), (0, -1), (-1, -1), (-1, 0))] == [
        place == corner for place in ((0, 0), (0, -1), (-1, -1), (-1, 0))
    ]


@pytest.mark.parametrize(("codec", "interval"), [("h264", 1), ("h264", 8), ("mpeg4", 4)])
def test_damaged_frames_are_stood_in_for_by_the_nearest_good_ones(codec: str, interval: int) -> None:
    data = bytearray(video(40, "mp4", codec, g=str(interval), bf="0"))
    for start, size in coded(bytes(data))[10:13]:
        data[start : start + size] = b"\xff" * size
    frames, facts = look(bytes(data), *range(40))
    assert 3 <= facts.replaced <= 3 + interval
    times = np.array(facts.times)
    assert np.abs(times - np.arange(40) / 25).max() <= (3 + interval) / 25
    untouched = [index for index in range(40) if index < 10 or index >= 13 + interval]
    assert near(frames[untouched], untouched) and times[untouched] == pytest.approx(np.array(untouched) / 25)
    if interval == 1:
        assert near(frames, [round(time * 25) for time in times])  # a stand-in has its own time
        frames, facts = look(bytes(data), 11, 30)  # jumps into the damage
        assert near(frames, [round(time * 25) for time in facts.times])
        assert facts.times[1] == pytest.approx(30 / 25) and facts.replaced == 1


def test_what_breaks_off_is_shown_up_to_there() -> None:
    data = video(50, "matroska", "h264", g="10")
    cut = data[: len(data) * 2 // 3]
    frames, facts = look(cut, 0, 10)
    assert near(frames, [0, 10]) and facts.replaced == 0
    with pytest.raises(Refused, match="VIDEO_SHORT"):
        look(cut, 49)


def test_limits_of_a_frame_and_of_all() -> None:
    data = video(4)
    with pytest.raises(Refused, match="VIDEO_TOO_LARGE") as large:
        look(data, 0, pixels=64 * 48 - 1)
    assert large.value.figures["requested"] == 64 * 48
    with pytest.raises(Refused, match="VIDEO_TOO_MUCH"):
        look(data, 0, 1, most=64 * 48 * 3 * 2 - 1)
    assert look(data, 0, 1, pixels=64 * 48, most=64 * 48 * 3 * 2)[0].shape[0] == 2


@pytest.mark.parametrize("codec", ["h264", "mpeg4"])
def test_random_damage_gives_frames_or_a_refusal(codec: str) -> None:
    chance = np.random.default_rng(5)
    whole = video(12, "mp4", codec, g="4")
    for _ in range(60):
        data = bytearray(whole)
        for at in chance.integers(0, len(data), 12):
            data[at] = chance.integers(256)
        try:
            frames, _ = look(bytes(data), 0, 5)
        except MemoryError:  # a length that was hit
            continue
        except Refused as refused:
            assert refused.code.startswith("VIDEO_")
        else:
            assert frames.shape[0] == 2


def test_other_codecs_are_not_run() -> None:
    with pytest.raises(Refused, match="VIDEO_UNREADABLE"):
        look(video(3, "avi", "ffv1"), 0)
