"""Data URLs: what is accepted, and what is refused rather than read as something else."""

from __future__ import annotations

import base64
from urllib.parse import quote

import grpc
import pytest
from gateway_fakes import picture, refused

from services.gateway.data_url import read_data_url

DATA = picture(40, 24) + bytes(range(256))
TEXT = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def read(url: str, max_bytes: int = 1 << 20) -> bytes:
    return read_data_url(url, "f", max_bytes=max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        f"data:image/png;a=b;c=d;base64,{TEXT}",
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:image/svg+xml.x-y;base64,{TEXT}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{quote(TEXT, safe='')}",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        f"data:image/png,{quote(DATA)}",
        f"data:,{quote(DATA)}",
    ],
)
def test_accepted(url: str) -> None:
    assert read(url) == DATA


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT[:-5]}!{TEXT[-4:]}",
        "data:image/png;base64,QUJDR",
        "data:image/png;base64,QU=JDRA=",
        "data:image/png;base64,QQ===",
        "data:image/png;base64,QUI",  # fine: padding may be missing
        f"data:image/png;base64,data:image/png;base64,{TEXT}",
        f"data:image/png;base64,{TEXT},{TEXT}",
        "data:image/png;base64,äöü",
        "data:image/png;base64",
        f"data:base64,{TEXT}",
        f"data:image/png;base64{TEXT}",
    ],
)
def test_damaged(url: str) -> None:
    if url.endswith(",QUI"):
        assert read(url) == b"AB"
        return
    with refused(INVALID) as errors:
        read(url)
    assert errors[0].field == "f"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://example.com/a.png", "fetching URLs is off"),
        ("HTTPS://example.com/a.png", "fetching URLs is off"),
        ("file:///etc/passwd", "file: URLs are not accepted"),
        ("ftp://example.com/a.png", "ftp: URLs are not accepted"),
        ("/etc/passwd", "not a URL"),
        ("picture.png", "not a URL"),
        (TEXT, "not a URL"),
        ("", "not a URL"),
    ],
)
def test_other_sources(url: str, text: str) -> None:
    with refused(INVALID, text):
        read(url)


def test_long_items() -> None:
    exact = base64.b64encode(b"x" * 3000).decode()
    assert len(read(f"data:;base64,{exact}", 3000)) == 3000
    for body in (exact, "QUJD" * 100_000):
        with refused(INVALID, "2999 bytes") as errors:
            read(f"data:;base64,{body}", 2999)
        assert errors[0].reason == "MEDIA_TOO_LARGE"
