"""Media that ``file:`` URLs name, from below one folder of the operator's. Blocking; run it in a thread."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from services.gateway.allowed_urls import UrlRefused

_NO_FOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_local(url: str, folder: Path, *, max_bytes: int) -> bytes:
    """The file's bytes, one more than ``max_bytes`` at most. Links are not followed, wherever on the way below ``folder``.

    Each part of the path is opened beneath the one before, so that swapping one for a link after a check leads nowhere.

    Raises:
        UrlRefused: it is not a regular file below the folder.
    """
    text = unquote(url[len("file:") :])
    path = PurePosixPath(text.removeprefix("//localhost") if text.startswith("//localhost/") else text.removeprefix("//"))
    if not path.is_absolute() or "\0" in text or ".." in path.parts:
        raise UrlRefused("no absolute path without '..'")
    try:
        below = path.relative_to(folder).parts
    except ValueError:
        raise UrlRefused("outside the allowed folder") from None
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in below:
            try:
                inner = os.open(part, _NO_FOLLOW, dir_fd=at)
            finally:
                os.close(at)
            at = inner
    except OSError as error:
        raise UrlRefused(f"not a file that can be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(at).st_mode):
        os.close(at)
        raise UrlRefused("not a regular file")
    with open(at, "rb") as file:
        return file.read(max_bytes + 1)
