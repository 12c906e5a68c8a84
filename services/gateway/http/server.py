"""Listens for HTTP/1.1 in the gateway's own event loop, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.gateway.http.door import Door

logger = logging.getLogger(__name__)
_HEAD_BYTES = 64 * 1024  # of a request line and its headers
_HEAD_SECONDS = 20.0  # in which they must have come
_IDLE_SECONDS = 75  # that a connection is kept for its next request; longer than usual load balancers keep theirs
_LAST_SECONDS = 2  # for answers to end in, and then for connections
_DEAD_MS = 40_000  # after which data that nobody takes, or probes that nobody answers, end a connection
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": _DEAD_MS}


class HttpServer:
    """Takes its port when it is made.

    Attributes:
        address: host:port.

    Raises:
        SystemExit: the port is taken, or the host is not this machine's.
    """

    def __init__(self, door: Door, host: str, port: int) -> None:
        self._door = door
        self._socket = _listen(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            door,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_LAST_SECONDS,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer from now on; connections made earlier have waited."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def drain(self) -> None:
        """Refuse new requests; returns when nothing runs."""
        await self._door.drain()

    async def stop(self) -> None:
        """End what still runs, with errors, and close every connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._door.close()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """One that leaves signals to the process it is in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection that is closed where the head of a request does not come in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    try:
        listener = socket.create_server((bare, port), family=socket.AF_INET6 if ":" in bare else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise SystemExit(
            f"cannot listen on {host}:{port}: the port is taken, or the address is not this machine's; choose another --http-port"
        ) from error
    # Connections have what their listener has.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener
