"""Bytes out of ``data:`` URLs (RFC 2397). Strict: what cannot be read exactly is refused, never read as something else."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

from services.common.errors import ServiceError, invalid

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BLANKS = b" \t\r\n"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def scheme_of(url: str) -> str:
    """What stands before the first colon, in lower case; nothing where it is no URL."""
    scheme = _SCHEME.match(url)
    return scheme[1].lower() if scheme else ""


def read_data_url(url: str, field: str, *, max_bytes: int) -> bytes:
    """The bytes that a data URL holds. Its media type is ignored: a format is told by the bytes.

    Base64 may be of either alphabet, broken into lines, percent-encoded, and without its padding.

    Raises:
        ServiceError: INVALID_ARGUMENT about ``field``.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise invalid(field, "not a URL; send the file's bytes, or a data: URL such as data:image/png;base64,iVBORw0...")
    name = scheme[1].lower()
    if name in ("http", "https"):
        raise invalid(field, "fetching URLs is off; send the file's bytes, or a data: URL", reason="URL_FETCHING_OFF")
    if name != "data":
        raise invalid(field, f"{name[:32]}: URLs are not accepted; send the file's bytes, or a data: URL")
    header, comma, body = url[scheme.end() :].partition(",")
    if not comma:
        raise invalid(field, "a data: URL needs a comma before its data, as in data:image/png;base64,iVBORw0...")
    media_type, *parameters = (part.strip() for part in header.split(";"))
    if media_type and "/" not in media_type:
        raise invalid(field, "a data: URL starts with a media type such as image/png, or with none, as in data:;base64,iVBORw0")
    # Before decoding: base64 is a third longer than its bytes, percent-encoding at most three times as long.
    if len(body) > 4 * max_bytes + 1024:
        raise too_many_bytes(field, max_bytes)
    data = _decode_base64(body, field) if "base64" in (p.lower() for p in parameters) else unquote_to_bytes(body)
    if len(data) > max_bytes:
        raise too_many_bytes(field, max_bytes)
    return data


def too_many_bytes(field: str, limit: int) -> ServiceError:
    """The error about an item that is too long."""
    text = f"more than {limit} bytes, which is the limit of one item; send a smaller file"
    return invalid(field, text, reason="MEDIA_TOO_LARGE", limit=limit)


def _decode_base64(body: str, field: str) -> bytes:
    letters = unquote_to_bytes(body).translate(_URL_SAFE, delete=_BLANKS)
    if b"=" not in letters:
        letters += b"=" * (-len(letters) % 4)
    try:
        return binascii.a2b_base64(letters, strict_mode=True)
    except binascii.Error:
        text = "its base64 is damaged: a wrong letter, a wrong length or padding inside"
        raise invalid(field, text, reason="BAD_MEDIA") from None
