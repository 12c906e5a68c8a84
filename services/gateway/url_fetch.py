"""Media named by URL: the one place of the gateway that opens a connection on a client's word.

Every hop is checked by :class:`UrlPolicy`: its scheme, host and port before anything, all addresses of its name before one of
them is dialled, and that very address is dialled, whatever the name resolves to by then. Proxies of the environment play no part.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin

import grpc
import httpcore2

from services.common import logs
from services.common.errors import ServiceError, invalid
from services.gateway.allowed_urls import Target, UrlPolicy, UrlRefused
from services.gateway.background import side_by_side
from services.gateway.config import GatewayConfig
from services.gateway.data_url import scheme_of, too_many_bytes
from services.gateway.local_files import read_local
from services.gateway.validator import Conversation, MediaPart

logger = logging.getLogger(__name__)
logging.getLogger("httpcore2").setLevel(logging.WARNING)  # its debug lines hold whole URLs, which may hold secrets
Resolve = Callable[[str, int], Awaitable[list[str]]]  # host and port to addresses

_AT_ONCE = 32  # files that are fetched at a time, for all requests together
_CONNECT, _SILENCE = 5.0, 10.0  # seconds: to connect, and between two pieces of an answer
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [(b"Accept", b"*/*"), (b"Accept-Encoding", b"identity"), (b"User-Agent", b"triptych"), (b"Connection", b"close")]


class Fetcher:
    """Fetches what conversations name, as far as the operator allows it.

    Args:
        config: the rules and limits.
        resolve: names to addresses; None asks the system.
        ssl_context: how servers prove who they are; None trusts what the system trusts.
    """

    def __init__(self, config: GatewayConfig, resolve: Resolve | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        self._policy = config.url_policy
        self._folder = Path(config.allowed_local_media_path).resolve() if config.allowed_local_media_path else None
        self._max_bytes, self._seconds = config.max_item_bytes, config.media_fetch_seconds
        self._redirects = config.media_redirects
        self._dial = _CheckedDial(self._policy, resolve or _system_resolve)
        self._ssl = ssl_context or (httpcore2.default_ssl_context() if self._policy.domains else None)
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def fetched(self, conversation: Conversation) -> tuple[Conversation, float]:
        """The conversation with bytes in place of URLs other than ``data:``, and the seconds that this took.

        Raises:
            ServiceError: INVALID_ARGUMENT about the first part that may not or cannot be fetched, DEADLINE_EXCEEDED where its
                server is too slow.
        """
        named = [
            part
            for message in conversation.messages
            for part in message.parts
            if isinstance(part, MediaPart) and isinstance(part.source, str) and self._is_fetched(scheme_of(part.source))
        ]
        if not named:
            return conversation, 0.0
        started = time.monotonic()
        found = {part.field: part for part in await side_by_side(map(self._part, named))}
        messages = tuple(
            replace(message, parts=tuple(found.get(p.field, p) if isinstance(p, MediaPart) else p for p in message.parts))
            for message in conversation.messages
        )
        return replace(conversation, messages=messages), time.monotonic() - started

    def _is_fetched(self, scheme: str) -> bool:
        """Whether anything of this kind is; all else is left to :func:`read_data_url`, which refuses it."""
        return (scheme in ("http", "https") and bool(self._policy.domains)) or (scheme == "file" and self._folder is not None)

    async def _part(self, part: MediaPart) -> MediaPart:
        assert isinstance(part.source, str)
        try:
            async with asyncio.timeout(self._seconds):
                if scheme_of(part.source) == "file":
                    assert self._folder is not None
                    data = await asyncio.to_thread(read_local, part.source, self._folder, max_bytes=self._max_bytes)
                else:
                    async with self._places:
                        data = await self._follow(part.source, part.field)
        except UrlRefused as refused:
            logs.event(logger, "url refused", logging.WARNING, field=part.field, why=str(refused))
            text = "this URL may not be fetched here; send the file's bytes, or a data: URL"
            raise invalid(part.field, text, reason="URL_NOT_ALLOWED") from None
        except (TimeoutError, httpcore2.TimeoutException):
            text = f"{part.field}: its server is too slow; send the file's bytes, or a data: URL"
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise ServiceError(code, text, field=part.field, reason="URL_TIMEOUT", metadata={"limit": self._seconds}) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            logs.event(logger, "url failed", field=part.field, why=type(error).__name__)
            text = "its server cannot be reached, or does not speak HTTP; look at the URL, or send the file's bytes"
            raise invalid(part.field, text, reason="URL_FAILED") from None
        if len(data) > self._max_bytes:
            raise too_many_bytes(part.field, self._max_bytes)
        return replace(part, source=data)

    async def _follow(self, url: str, field: str) -> bytes:
        target = self._policy.target(url)
        for _ in range(self._redirects + 1):
            answer = await self._get(target, field)
            if isinstance(answer, bytes):
                return answer
            following = self._policy.target(answer)
            if target.scheme == "https" and following.scheme == "http":
                raise UrlRefused("a redirect from https to http")
            target = following
        raise invalid(field, f"more than {self._redirects} redirects; send the URL of the file itself", reason="URL_FAILED")

    async def _get(self, target: Target, field: str) -> bytes | str:
        """One hop, on a connection of its own: the file's bytes, or where to go next."""
        timeouts = {"connect": _CONNECT, "read": _SILENCE, "write": _SILENCE, "pool": _CONNECT}
        async with (
            httpcore2.AsyncConnectionPool(ssl_context=self._ssl, max_keepalive_connections=0, network_backend=self._dial) as pool,
            pool.stream("GET", target.url, headers=_HEADERS, extensions={"timeout": timeouts}) as response,
        ):
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in headers:
                try:
                    return urljoin(target.url, headers[b"location"].decode("latin-1"))
                except ValueError:
                    raise UrlRefused("a redirect to no URL") from None
            if response.status != 200:
                text = f"its server answered with status {response.status}; look at the URL, or send the file's bytes"
                raise invalid(field, text, reason="URL_FAILED", status=response.status)
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise invalid(field, "its server sends it compressed though asked not to", reason="URL_FAILED")
            if int(headers.get(b"content-length", b"0")) > self._max_bytes:
                raise too_many_bytes(field, self._max_bytes)
            return await self._body(response, field)

    async def _body(self, response: httpcore2.Response, field: str) -> bytes:
        pieces, size = [], 0
        async with aclosing(response.aiter_stream()) as stream:
            async for piece in stream:
                size += len(piece)
                if size > self._max_bytes:
                    raise too_many_bytes(field, self._max_bytes)
                pieces.append(piece)
        return b"".join(pieces)


class _CheckedDial(httpcore2.AsyncNetworkBackend):
    """Resolves a name once, checks every answer, and dials those. TLS above it goes on with the name."""

    def __init__(self, policy: UrlPolicy, resolve: Resolve) -> None:
        self._policy, self._resolve, self._dial = policy, resolve, httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        self._policy.check(addresses)
        *others, last = addresses
        for address in others:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._dial.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._dial.connect_tcp(last, port, timeout, local_address, socket_options)


async def _system_resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
