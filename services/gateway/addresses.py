"""Where servers are: addresses as the operator gave them, and names that are looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from services.common import logs

logger = logging.getLogger(__name__)
_DNS = "dns:"
_LOOKUP_TIMEOUT = 1.0  # seconds; polls wait for it
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


def parse_addresses(flag: str, text: str) -> tuple[str, ...]:
    """The entries of a list such as ``host:port,dns:name:port``.

    Raises:
        ValueError: an entry is neither, or comes twice; the text names ``flag``.
    """
    entries = tuple(part.strip() for part in text.split(",") if part.strip())
    for entry in entries:
        host, _, port = entry.removeprefix(_DNS).rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            text = (
                f"{flag} must be host:port, dns:name:port for all that a name has, or several separated by commas, got {entry!r}"
            )
            raise ValueError(text)
    if len(set(entries)) != len(entries):
        raise ValueError(f"{flag} names an address twice: {text}")
    return entries


async def lookup(name: str, port: int) -> Sequence[str]:
    """Every ``address:port`` that a name has now.

    Raises:
        OSError: it has none, or nobody could be asked.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(where[0]) for *_, where in found)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class Directory:
    """The addresses behind the entries of one list. A name that cannot be looked up keeps the addresses that it last had."""

    def __init__(self, entries: Sequence[str], lookup: Lookup = lookup) -> None:
        self._entries, self._lookup = entries, lookup
        self._known: dict[str, Sequence[str]] = {}

    @property
    def changes(self) -> bool:
        """Whether there are names to be looked up."""
        return any(entry.startswith(_DNS) for entry in self._entries)

    async def addresses(self) -> list[str]:
        """All addresses, each once."""
        names = [entry for entry in self._entries if entry.startswith(_DNS)]
        for entry, found in zip(names, await asyncio.gather(*map(self._look, names)), strict=True):
            self._known[entry] = found
        return list(dict.fromkeys(a for entry in self._entries for a in self._known.get(entry, [entry])))

    async def _look(self, entry: str) -> Sequence[str]:
        host, _, port = entry.removeprefix(_DNS).rpartition(":")
        known = self._known.get(entry, [])
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT):
                found = sorted(await self._lookup(host, int(port)))
        except OSError as error:
            logs.event(logger, "name not found", logging.WARNING, host=host, cause=str(error), kept=len(known))
            return known
        if found != known:
            logs.event(logger, "name found", host=host, addresses=found)
        return found
