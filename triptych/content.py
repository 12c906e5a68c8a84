"""What a message is made of: text, media and roles. It does not know formats: the gateway reads the headers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from triptych.errors import InvalidArgument, MediaFileError

ModalityName = Literal["image", "audio", "video"]
Source: TypeAlias = str | os.PathLike[str] | bytes


@dataclass(frozen=True)
class MediaPart:
    """A media item: its file's bytes, or the URL where the gateway gets them."""

    modality: ModalityName
    data: bytes = field(default=b"", repr=False)
    url: str = ""


Part: TypeAlias = str | MediaPart | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = str | MediaPart | Sequence[Part]


def image(source: Source) -> MediaPart:
    """A still picture from a path, bytes, or a data:, http: or https: URL.

    Raises:
        MediaFileError: the file is missing, empty or unreadable.
    """
    return _media("image", source)


def audio(source: Source) -> MediaPart:
    """A sound; otherwise as `image`."""
    return _media("audio", source)


def video(source: Source) -> MediaPart:
    """Moving pictures; otherwise as `image`."""
    return _media("video", source)


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
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise MediaFileError(f"cannot read {modality} file {path!r}: {why}") from error
    if not data:
        raise MediaFileError(f"cannot use {modality} file {path!r}: it is empty")
    return MediaPart(modality, data=data)
