"""What a message is made of: text, media and roles. It does not know formats: the gateway reads the headers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from triptych.errors import InvalidArgument, MediaFileError

ModalityName = Literal["image", "audio", "video"]
DetailName = Literal["auto", "low", "high"]
Source: TypeAlias = str | os.PathLike[str] | bytes


@dataclass(frozen=True)
class MediaPart:
    """A media item: its file's bytes, or the URL where the gateway gets them, and how closely the model looks at it."""

    modality: ModalityName
    data: bytes = field(default=b"", repr=False)
    url: str = ""
    detail: DetailName = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


Part: TypeAlias = str | MediaPart | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Part | Sequence[Part]


def image(
    source: Source, *, detail: DetailName = "auto", min_pixels: int | None = None, max_pixels: int | None = None
) -> MediaPart:
    """A still picture from a path, bytes, or a data:, http: or https: URL.

    Args:
        source: where its bytes are.
        detail: "low" costs few tokens; "auto" and "high" are what the checkpoint's processor does.
        min_pixels: it is enlarged to at least so many; of models that take any size, the Qwen ones.
        max_pixels: and made smaller to at most so many.

    Raises:
        MediaFileError: the file is missing, empty or unreadable.
    """
    return replace(_media("image", source), detail=detail, min_pixels=min_pixels, max_pixels=max_pixels)


def audio(source: Source) -> MediaPart:
    """A sound; otherwise as `image`."""
    return _media("audio", source)


def video(source: Source, *, min_pixels: int | None = None, max_pixels: int | None = None) -> MediaPart:
    """Moving pictures; the pixels are those of a frame; otherwise as `image`."""
    return replace(_media("video", source), min_pixels=min_pixels, max_pixels=max_pixels)


def system(*parts: Part) -> Message:
    """Instructions to the model."""
    return {"role": "system", "content": list(parts)}


def user(*parts: Part) -> Message:
    """A turn of the person or program asking."""
    return {"role": "user", "content": list(parts)}


def assistant(*parts: Part) -> Message:
    """An earlier answer of the model."""
    return {"role": "assistant", "content": list(parts)}


def _media(modality: ModalityName, source: Source) -> MediaPart:
    if isinstance(source, bytes | bytearray | memoryview):
        if not source:
            raise InvalidArgument(f"the {modality} is empty: it has no bytes")
        return MediaPart(modality, data=bytes(source))
    if isinstance(source, str) and source.lower().startswith(("data:", "http://", "https://")):
        return MediaPart(modality, url=source)
    return MediaPart(modality, data=read_file(source, f"{modality} file "))


def read_file(path: str | os.PathLike[str], what: str = "") -> bytes:
    """A file's bytes.

    Raises:
        MediaFileError: it is missing, empty or unreadable; the text calls it ``what``.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:
        raise MediaFileError(f"cannot read {what}{path!r}: {getattr(error, 'strerror', None) or error}") from error
    if not data:
        raise MediaFileError(f"cannot use {what}{path!r}: it is empty")
    return data
