"""The pages of files and folders, for `triptych ask --pages`."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from triptych import content
from triptych.errors import MediaFileError
from triptych.pdf import pdf

_SUFFIXES = {
    content.image: (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif"),
    content.audio: (".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus"),
    content.video: (".mp4", ".mov", ".webm", ".mkv", ".avi"),
}
_READERS = {suffix: reader for reader, suffixes in _SUFFIXES.items() for suffix in suffixes}


class Document:
    """Every page of a PDF is one, and every picture, recording and video; of folders, such files by name, numbers in order.

    PDFs are opened at once, everything else when its turn comes.

    Attributes:
        titles: every page's name.
        sent: places, in `titles`, of the pages that iterating has yielded.
        failures: pages that iterating skipped, by place, because they could not be read.

    Raises:
        MediaFileError: a file is missing or of no known kind, or there is no page at all.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.titles: list[str] = []
        self.sent: list[int] = []
        self.failures: dict[int, MediaFileError] = {}
        self._readers: list[Callable[[], content.MediaPart]] = []
        for path in paths:
            for file in _files(path):
                self._add(file)

    def __len__(self) -> int:
        return len(self.titles)

    def __iter__(self) -> Iterator[content.MediaPart]:
        for place, read in enumerate(self._readers):
            try:
                page = read()
            except MediaFileError as error:
                self.failures[place] = error
                continue
            self.sent.append(place)
            yield page

    def _add(self, file: str) -> None:
        if _suffix(file) == ".pdf":
            pages = pdf(file)
            self.titles += [f"{file}, page {number + 1}" for number in range(len(pages))]
            self._readers += [partial(pages.__getitem__, number) for number in range(len(pages))]
        else:
            self.titles.append(file)
            self._readers.append(partial(_READERS[_suffix(file)], file))


def _files(path: str) -> list[str]:
    """The file itself, or a folder's."""
    if os.path.isdir(path):
        names = sorted(os.listdir(path), key=lambda name: [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", name)])
        files = [os.path.join(path, name) for name in names if _is_known(name)]
        if not files:
            raise MediaFileError(f"cannot use {path!r}: the folder has no PDF, picture, recording or video")
        return files
    if not os.path.isfile(path):
        raise MediaFileError(f"cannot read {path!r}: there is no such file")
    if not _is_known(path):
        raise MediaFileError(f"cannot tell what {path!r} is: a page's file is named {' '.join(['.pdf', *_READERS])}")
    return [path]


def _is_known(name: str) -> bool:
    return _suffix(name) == ".pdf" or _suffix(name) in _READERS


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
