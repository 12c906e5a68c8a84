"""Why a file was not decoded: a code and figures. Texts are made from a table on the side that can be trusted, so that
nothing which hostile bytes made a decoder say ever reaches a client."""

from __future__ import annotations

from collections.abc import Mapping

from services.decoding.image_files import ACCEPTED as PICTURES

SOUNDS = "WAV, MP3, M4A, AAC, FLAC, OGG, Opus and WebM"
VIDEOS = "MP4, MOV, WebM, MKV and AVI with H.264, HEVC, VP8, VP9, AV1, MPEG-4 or MJPEG"

TEXTS: Mapping[str, str] = {
    "IMAGE_UNREADABLE": f"the data is not a readable image; accepted are {PICTURES}",
    "IMAGE_TRUNCATED": "the image data ends early (truncated file); send the whole file",
    "IMAGE_EMPTY": "the image is {width} x {height} pixels; it needs at least 1 x 1",
    "IMAGE_TOO_LARGE": "the image is {width} x {height} pixels; at most {limit} pixels are accepted, make it smaller",
    "IMAGE_SAMPLES": "the image has 32 bits a sample; accepted are 1, 8 and 16, convert it first",
    "AUDIO_UNREADABLE": f"the data is not a readable recording; accepted are {SOUNDS}",
    "AUDIO_MISSING": "the file holds no sound; send a recording",
    "AUDIO_EMPTY": "the recording has no samples",
    "AUDIO_RATE": "the recording has {requested} samples a second; accepted are {least} to {limit}",
    "AUDIO_CHANNELS": "the recording has {requested} channels; at most {limit} are accepted",
    "AUDIO_TOO_LONG": "the recording is longer than {limit} samples at {rate} a second, the limit; send a shorter one",
    "AUDIO_PACKETS": "the recording has more than {limit} packets, the limit; join them to larger ones or send a shorter one",
    "AUDIO_NOT_FINITE": "the recording has samples that are infinite or no numbers",
    "VIDEO_UNREADABLE": f"the data is not a readable video; accepted are {VIDEOS}",
    "VIDEO_MISSING": "the file holds no moving picture; send a video",
    "VIDEO_EMPTY": "no frame of the video can be decoded",
    "VIDEO_SHORT": "frame {requested} of the video was planned and it has {limit}",
    "VIDEO_TOO_LARGE": "the video is {width} x {height} pixels; at most {limit} pixels are accepted, make it smaller",
    "VIDEO_TOO_MUCH": "the frames looked at take {requested} bytes, the limit is {limit}; make the video smaller or shorter",
    "VIDEO_PACKETS": "the video has more than {limit} frames, the limit; send a shorter one",
    "DECODE_MEMORY": "decoding the {word} takes more memory than the {limit} bytes allowed; make it smaller",
    "DECODE_TIMEOUT": "decoding the {word} takes longer than allowed; make it smaller or shorter",
    "DECODE_CRASHED": "decoding the {word} crashed the decoder; the file is damaged, convert it and try again",
}


class Refused(Exception):
    """A file that is not decoded.

    Args:
        code: key of ``TEXTS``.
        figures: numbers in that text.
    """

    def __init__(self, code: str, **figures: int) -> None:
        super().__init__(code)
        assert code in TEXTS, code
        self.code = code
        self.figures = figures
