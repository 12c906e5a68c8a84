"""One HTTP request and its answer, over ASGI. To servicers it is the call's context."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from services.common.interceptor import LARGE_BODY, REQUEST_ID_HEADER, clean_request_id
from services.gateway.http.problems import HttpError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
TIMEOUT_HEADER = "x-request-timeout"
_BODY_SECONDS = 300.0  # that a whole body may take
_LONGEST = 24 * 3600.0  # seconds; more counts as none
_LINGER_SECONDS, _LINGER_BYTES = 5.0, 256 * 1024 * 1024


class ClientLeft(Exception):
    """The client closed the connection, or has not read for too long."""


class Exchange:
    """Reads the request and writes the answer.

    Attributes:
        method: in capitals, as sent.
        request_id: the client's where it is a proper one.
        status: of the answer; 0 until it has begun.
        body_bytes: of the request's body, as far as it has come.

    Args:
        scope, receive, send: of ASGI.
        stall_seconds: how long a client may neither send the next piece of its body nor take the next of the answer.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send, stall_seconds: float) -> None:
        self._scope, self._receive, self._send, self._stall = scope, receive, send, stall_seconds
        self._headers: dict[str, str] = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._began = time.monotonic()
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.request_id = clean_request_id(self.header(REQUEST_ID_HEADER))
        self.status = 0
        self.body_bytes = 0
        self._unread = self.header("content-length") not in ("", "0") or bool(self.header("transfer-encoding"))

    def header(self, name: str) -> str:
        """A header's value; nothing where it was not sent."""
        return self._headers.get(name, "")

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._began

    def time_remaining(self) -> float | None:
        """What is left of the time that the client allows in ``X-Request-Timeout``, in seconds; None where it does not say.

        Raises:
            HttpError: 400, the header is no number of seconds.
        """
        text = self.header(TIMEOUT_HEADER)
        if not text:
            return None
        try:
            allowed = float(text)
        except ValueError:
            allowed = -1.0
        if not allowed > 0:  # NaN too
            raise HttpError(400, f"{TIMEOUT_HEADER} must be a number of seconds above 0", code="invalid_header")
        return min(allowed, _LONGEST) - self.seconds

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC's metadata: the request's id, and the caller's credentials where there are any."""
        credentials = self.header("authorization")
        given = (("authorization", credentials),) if credentials else ()
        return ((REQUEST_ID_HEADER, self.request_id), *given)

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """Do what takes as long as the body is: where that is large, on a thread, so that other requests get their turn."""
        return await asyncio.to_thread(work, *args) if self.body_bytes > LARGE_BODY else work(*args)

    async def json_body(self, limit: int, taken: Callable[[int], None]) -> bytes:
        """The whole body. ``taken`` is told of every piece that came and may refuse it.

        Raises:
            HttpError: it is no JSON by its own account (415), longer than ``limit`` bytes (413), or stopped coming (408).
            ClientLeft: the client is gone.
        """
        kind = self.header("content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "send JSON, with the header content-type: application/json", code="unsupported_media_type")
        if self.header("content-encoding") not in ("", "identity"):
            raise HttpError(415, "send the body as it is, without a content-encoding", code="unsupported_encoding")
        length = self.header("content-length")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await self._whole_body(limit, taken)
        except TimeoutError:
            raise HttpError(408, "the body did not come in time; send it again", code="request_timeout") from None
        self._unread = False
        return body

    async def _whole_body(self, limit: int, taken: Callable[[int], None]) -> bytes:
        body = bytearray()
        more = True
        while more:
            async with asyncio.timeout(self._stall):
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            size, self.body_bytes = self.body_bytes, len(body)
            try:
                taken(self.body_bytes - size)
                if len(body) > limit:
                    raise _too_large(limit)
            except Exception:
                body.clear()  # which the error would keep until the last of it has come
                raise
            more = message.get("more_body", False)
        return bytes(body)

    async def gone(self) -> None:
        """Returns once the client has left. For after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer."""
        await self._start(status, {"content-type": kind, "content-length": str(len(body)), **(headers or {})})
        await self._write(body, more=False)

    async def reply_json(self, body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer, as JSON."""
        await self.reply(status, json.dumps(body).encode(), "application/json", headers)

    async def refuse(self, error: HttpError) -> None:
        """Answer with an error. A stream that has begun ends with it, and without the mark of a complete one.

        Where the body was not read to its end, the client may notice the answer only once it has sent all: what still comes is
        taken in and forgotten for a while before the connection closes.
        """
        if self.status:
            await self._write(_event(error.body), more=False)
        elif not self._unread:
            await self.reply_json(error.body, error.status, error.headers)
        else:
            body = json.dumps(error.body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            await self._start(error.status, {**headers, **error.headers})
            await self._write(body, more=True)
            await self._linger()
            await self._write(b"", more=False)

    async def events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """More of an answer that is a stream of server-sent events; the first begins it."""
        data = b"".join(map(_event, events))
        if not data:
            return
        if not self.status:
            kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(200, kind)
        await self._write(data, more=True)

    async def end_events(self) -> None:
        """A stream is complete."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        sent = {**headers, REQUEST_ID_HEADER: self.request_id}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Waits while the connection's buffer is full."""
        try:
            async with asyncio.timeout(self._stall):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientLeft from None

    async def _linger(self) -> None:
        taken, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while more and taken < _LINGER_BYTES:
                    message = await self._receive()
                    taken += len(message.get("body", b""))
                    more = message.get("more_body", False)


def _event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event, in ASCII: no reader can take a character of it for the end of a line."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body has more than {limit} bytes, which is the limit; send less", code="request_too_large")
