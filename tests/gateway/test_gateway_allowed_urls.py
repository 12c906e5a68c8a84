"""Which URLs may be fetched and which addresses dialled: the operator's rules, without a connection."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from services.gateway.allowed_urls import UrlPolicy, UrlRefused, is_public
from services.gateway.config import GatewayConfig

POLICY = UrlPolicy.of("a.org,*.b.org,c.net:8443,93.184.216.34,[2606:2800::1]", "")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://a.org", ("http", "a.org", 80, "/")),
        ("HTTPS://A.ORG./x.png?q=1#top", ("https", "a.org", 443, "/x.png?q=1")),
        ("https://a.org:80/", ("https", "a.org", 80, "/")),
        ("http://x.y.b.org/?#", ("http", "x.y.b.org", 80, "/?")),
        ("http://a.org?q=/", ("http", "a.org", 80, "/?q=/")),
        ("https://c.net:8443/a", ("https", "c.net", 8443, "/a")),
        ("http://93.184.216.34/a", ("http", "93.184.216.34", 80, "/a")),
        ("http://[2606:2800:0:0::1]/a", ("http", "2606:2800::1", 80, "/a")),
    ],
)
def test_allowed_urls(url: str, parts: tuple[str, str, int, str]) -> None:
    target = POLICY.target(url)
    assert (target.scheme, target.host, target.port, target.path) == parts
    assert POLICY.target(target.url) == target


BAD_URLS = [
    *("http://b.org/", "http://xb.org/", "http://evil.org/", "http://a.org.evil.org/", "http://evil.org/a.org"),
    *("http://a.org:8080/", "http://a.org:22/", "https://c.net/", "http://a.org:0/", "http://a.org:99999/", "http://a.org:/"),
    *("http://user@a.org/", "http://user:pass@a.org/", "http://a.org@127.0.0.1/", "http://127.0.0.1#@a.org/"),
    *("http://a.org\\@127.0.0.1/", "http://a.org/\\..", "http://a.org /", "http://a.org/\r\nHost: x", "http://a.org/\x00"),
    *(
        "http:///a.org",
        "http:a.org",
        "//a.org/",
        "http://",
        "http://.a.org/",
        "http://a..org/",
        "http://-a.org/",
        "http://ä.org/",
    ),
    *("http://[::1]/", "http://[::1%25eth0]/", "http://[a.org]/", "http://[1:2]/", "ftp://a.org/", "gopher://a.org/", ""),
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_refused_urls(url: str) -> None:
    with pytest.raises(UrlRefused):
        POLICY.target(url)


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "0x7f.0.0.1", "1.2.3.4.5", "0", "127.0.0.0x1"]
)
def test_addresses_in_disguise(host: str) -> None:
    """Resolvers read these as addresses: they are none here, even where every host is allowed."""
    with pytest.raises(UrlRefused, match="malformed address"):
        UrlPolicy.of("*", "0.0.0.0/0").target(f"http://{host}/")


PRIVATE = [
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "0.1.2.3"),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.0.0.170", "192.88.99.1"),
    *("::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "fe80::1", "fe80::1%1", "fc00::1", "fd12::1", "fec0::1"),
    *("ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_never_dialled(address: str) -> None:
    """Alone, and among public ones."""
    for found in ([address], ["93.184.216.34", address]):
        with pytest.raises(UrlRefused, match="not public"):
            UrlPolicy.of("*", "").check(found)


def test_public_addresses_and_those_that_the_operator_trusts() -> None:
    for address in ("93.184.216.34", "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"):
        UrlPolicy.of("*", "").check([address])
    trusting = UrlPolicy.of("*", "10.1.0.0/16,fd12::/32")
    trusting.check(["10.1.2.3", "fd12::1", "::ffff:10.1.2.3"])
    for address in ("10.2.0.1", "fd13::1", "::ffff:10.2.0.1"):
        with pytest.raises(UrlRefused):
            trusting.check([address])
    with pytest.raises(UrlRefused, match="no address"):
        trusting.check([])
    assert is_public(ipaddress.ip_address("8.8.8.8"))


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"allowed_media_domains": entry}
            for entry in ("a b", "http://a.org", "*.*.org", "a.org:0", "a.org:70000", "127.1", "*a.org")
        ),
        {"allowed_media_private_networks": "10.0.0.1/8"},
        {"allowed_media_private_networks": "home"},
        {"allowed_local_media_path": "/no/such/folder"},
        {"media_fetch_seconds": 0},
        {"media_redirects": -1},
        {"max_video_seconds": 0},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        GatewayConfig(llm="h:1", **options)
