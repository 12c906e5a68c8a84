"""The ASGI application: finds the route, lets it answer, and turns what goes wrong into answers that OpenAI's clients understand.

A request ends early when its client leaves or the door is closed; the route is then cancelled, which reaches the backends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import prometheus_client

from services.common import logs
from services.common.errors import unavailable
from services.common.interceptor import LARGE_BODY, explained, full
from services.gateway.http.exchange import ClientLeft, Exchange, Message, Receive, Send
from services.gateway.http.problems import HttpError, to_http
from services.gateway.http.values import Value, read_json

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ANSWERS = prometheus_client.Counter("triptych_http_answers", "Answers of the HTTP door", ["route", "status"])
_LEFT = 499  # the status in logs and metrics where the client left before one was sent
_DRAINING = "the service is shutting down; send the request to another replica or try again"


@dataclass(frozen=True)
class Route:
    """What answers at a path.

    Attributes:
        method: GET or POST; GET answers HEAD too.
        answer: gets the body as JSON; that of a GET is null.
        quiet: answers are not logged: a probe asks every few seconds.
        open: whoever asks is answered, whether they may do anything else or not.
    """

    method: str
    answer: Callable[[Exchange, Value], Awaitable[None]]
    quiet: bool = False
    open: bool = False


class Door:
    """Serves routes by path; a path that ends in ``/*`` stands for all below it.

    Args:
        routes: by path.
        check_caller: raises where a caller may not do anything; comes before the body is read.
        max_body_bytes: longest body.
        max_held_bytes: of all bodies together, from their coming to the end of the answers; small ones always find room.
        stall_seconds: see :class:`Exchange`.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        check_caller: Callable[[Exchange], Awaitable[None]],
        max_body_bytes: int,
        max_held_bytes: int,
        stall_seconds: float,
    ) -> None:
        self._routes, self._check_caller = routes, check_caller
        self._max_body_bytes, self._max_held_bytes, self._stall_seconds = max_body_bytes, max_held_bytes, stall_seconds
        self._running = self._held_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False

    async def drain(self) -> None:
        """Refuse new requests; returns when nothing runs."""
        self.draining = True
        await self._idle.wait()

    async def close(self) -> None:
        """End what still runs, with an error; returns when nothing runs."""
        self.draining = True
        if not self._closing.done():
            self._closing.set_result(None)
        await self._idle.wait()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI's call, one a request; it never raises."""
        assert scope["type"] == "http", "lifespan and websockets are off"
        exchange = Exchange(scope, receive, send, self._stall_seconds)
        logs.request_id.set(exchange.request_id)
        name, route = self._find(exchange.path)
        self._running += 1
        self._idle.clear()
        try:
            await self._end_well(exchange, route, name)
        finally:
            self._running -= 1
            self._held_bytes -= exchange.body_bytes
            if not self._running:
                self._idle.set()
        status = exchange.status or _LEFT
        _ANSWERS.labels(name, status).inc()
        level = logging.DEBUG if route and route.quiet else logging.INFO
        logs.event(
            logger, "http call", level, method=exchange.method, route=name, status=status, seconds=round(exchange.seconds, 4)
        )

    def _find(self, path: str) -> tuple[str, Route | None]:
        """A route and its path as the table has it, which is fit for logs and metrics."""
        if path in self._routes:
            return path, self._routes[path]
        for pattern, route in self._routes.items():
            if pattern.endswith("/*") and len(path) >= len(pattern) and path.startswith(pattern[:-1]):
                return pattern, route
        return "none", None

    async def _end_well(self, exchange: Exchange, route: Route | None, name: str) -> None:
        try:
            await self._answer(exchange, route)
        except ClientLeft:
            logs.event(logger, "client left", route=name)
        except HttpError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            await self._refuse(exchange, to_http(explained(error, exchange.request_id, route=name)))

    async def _refuse(self, exchange: Exchange, error: HttpError) -> None:
        if error.code:
            logs.event(logger, "refused", status=error.status, code=error.code, param=error.param)
        try:
            await exchange.refuse(error)
        except ClientLeft:
            logs.event(logger, "client left")

    async def _answer(self, exchange: Exchange, route: Route | None) -> None:
        if route is None:
            raise HttpError(404, "there is nothing at this path; the API is below /v1", code="not_found")
        allowed = ("GET", "HEAD", "OPTIONS") if route.method == "GET" else ("POST", "OPTIONS")
        allow = {"allow": ", ".join(allowed)}
        if exchange.method == "OPTIONS":
            await exchange.reply(200, b"", "text/plain", allow)
            return
        if exchange.method not in allowed:
            raise HttpError(405, f"this path takes {route.method}", code="method_not_allowed", headers=allow)
        if self.draining:
            raise unavailable(_DRAINING)
        if not route.open:
            await self._check_caller(exchange)
        # Nothing here keeps the body, which can be large, while it is answered.
        body = self._body(exchange) if route.method == "POST" else _no_body()
        await self._while_wanted(route.answer(exchange, await self._while_wanted(body)), exchange.gone())

    async def _body(self, exchange: Exchange) -> Value:
        def taken(size: int) -> None:
            self._held_bytes += size
            if exchange.body_bytes > LARGE_BODY and self._held_bytes > max(self._max_held_bytes, exchange.body_bytes):
                self._held_bytes -= exchange.body_bytes
                exchange.body_bytes = 0
                raise full()

        return await exchange.aside(read_json, await exchange.json_body(self._max_body_bytes, taken))

    async def _while_wanted(self, work: Awaitable[T], *gone: Awaitable[None]) -> T:
        """What comes of ``work``, which is given up where ``gone`` returns or the door closes."""
        working = asyncio.ensure_future(work)
        tasks: list[asyncio.Future[Any]] = [working, *map(asyncio.ensure_future, gone)]
        try:
            await asyncio.wait([*tasks, self._closing], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise unavailable(_DRAINING) if self._closing.done() else ClientLeft


async def _no_body() -> Value:
    return Value(None)
