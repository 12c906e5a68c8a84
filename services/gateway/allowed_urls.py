"""Which URLs the operator lets the gateway fetch, and which addresses may be dialled for them. Nothing is fetched here.

There is one parser, and it takes a narrow grammar: what other parsers could read in another way is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS = {"http": 80, "https": 443}

_URL = re.compile(r"(https?)://([^/?#]*)([/?][!\x22$-~]*)?(?:#[!-~]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")  # a last label that resolvers read as part of an address
_NEVER_PUBLIC = tuple(  # what carries an IPv4 address inside (NAT64, 6to4, Teredo, compatible, translated); relays; site-local
    ipaddress.ip_network(text)
    for text in (
        *("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "::ffff:0:0:0/96"),
        *("192.88.99.0/24", "fec0::/10"),
    )
)


class UrlRefused(Exception):
    """A URL that is not fetched. The text is for the log: a client is not told which rule it was."""


@dataclass(frozen=True)
class Target:
    """A URL that may be fetched, in parts: ``scheme`` and ``host`` in lower case, ``path`` with its query, ASCII."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """All of it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if self.port == PORTS[self.scheme] else f':{self.port}'}{self.path}"


@dataclass(frozen=True)
class UrlPolicy:
    """The operator's rules.

    Attributes:
        domains: hosts that may be named, each with the port that it may be named with, or None for 80 and 443. ``*.b.org``
            stands for every name below ``b.org``, ``*`` for every host. None: nothing is fetched.
        private: networks whose addresses may be dialled though they are not public.
    """

    domains: tuple[tuple[str, int | None], ...] = ()
    private: tuple[Network, ...] = ()

    @classmethod
    def of(cls, domains: str, private: str) -> UrlPolicy:
        """From lists separated by commas: ``a.org,*.b.org,c.net:8443`` and ``10.0.0.0/8``.

        Raises:
            ValueError: an entry that is neither.
        """
        return cls(
            tuple(_domain(entry) for entry in _entries(domains)),
            tuple(ipaddress.ip_network(entry) for entry in _entries(private)),
        )

    def target(self, url: str) -> Target:
        """The URL in parts.

        Raises:
            UrlRefused: it is malformed, holds credentials, or names a host or port that is not allowed.
        """
        match = _URL.fullmatch(url)
        if match is None:
            raise UrlRefused("not an http(s) URL of printable ASCII characters")
        if "\\" in url:  # which some parsers take for a slash
            raise UrlRefused("a backslash")
        scheme, path = match[1].lower(), match[3] or "/"
        authority = _AUTHORITY.fullmatch(match[2])
        if authority is None:
            raise UrlRefused("a host that is no name or address, or credentials")
        host = _host(authority[1])
        port = int(authority[2]) if authority[2] else PORTS[scheme]
        if not any(_named(pattern, host) and port in ([only] if only else PORTS.values()) for pattern, only in self.domains):
            raise UrlRefused(f"host {host} with port {port} is not allowed")
        return Target(scheme, host, port, path if path.startswith("/") else f"/{path}")

    def check(self, addresses: Sequence[str]) -> None:
        """Check everything that a name resolved to, as any of it might be dialled.

        Raises:
            UrlRefused: there is nothing, or an address that is not public.
        """
        if not addresses:
            raise UrlRefused("the name has no address")
        for text in addresses:
            address = ipaddress.ip_address(text)
            if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
                address = address.ipv4_mapped
            if not is_public(address) and not any(address in network for network in self.private):
                raise UrlRefused(f"address {address} is not public")


def is_public(address: Address) -> bool:
    """Whether everybody can reach it, and it carries no other address inside."""
    if any(address in network for network in _NEVER_PUBLIC if network.version == address.version):
        return False
    special = address.is_multicast or address.is_reserved or address.is_unspecified
    return address.is_global and not (special or address.is_loopback or address.is_link_local)


def _host(text: str) -> str:
    """A name in lower case without its last dot, or an address in its usual form, IPv6 without brackets."""
    try:
        if text.startswith("["):
            return str(ipaddress.IPv6Address(text[1:-1]))
        host = text.lower().removesuffix(".")
        if _NUMBER.fullmatch(host.rpartition(".")[2]):
            return str(ipaddress.IPv4Address(host))  # four decimal numbers without leading zeros
    except ValueError:
        raise UrlRefused("a malformed address") from None
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise UrlRefused("a malformed name")
    return host


def _named(pattern: str, host: str) -> bool:
    if pattern == "*":
        return True
    return host.endswith(pattern[1:]) and host != pattern[1:] if pattern.startswith("*.") else host == pattern


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _domain(entry: str) -> tuple[str, int | None]:
    authority = _AUTHORITY.fullmatch(entry.removeprefix("*.")) if entry != "*" else None
    try:
        if entry == "*":
            return entry, None
        if authority is None:
            raise UrlRefused("no host")
        host = _host(authority[1])
    except UrlRefused:
        raise ValueError(f"{entry!r} is no host such as a.org, *.b.org or c.net:8443") from None
    port = int(authority[2]) if authority[2] else None
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"{entry!r} has no port between 1 and 65535")
    return ("*." if entry.startswith("*.") else "") + host, port
