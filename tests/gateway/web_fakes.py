"""A web server on loopback that counts connections, names that resolve as a test likes, and a fetcher between them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from gateway_fakes import picture

from services.gateway.config import GatewayConfig
from services.gateway.sampling import read_sampling
from services.gateway.url_fetch import Fetcher, Resolve
from services.gateway.validator import Conversation, MediaPart, Message
from services.models.media import Modality
from triptych.common.v1 import sampling_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FIELD = "messages[0].parts[0].image"
PNG = picture(40, 24)
GENERIC = "may not be fetched here"


@dataclass
class Site:
    """A web server on loopback that counts connections; a path answers with the bytes that ``pages`` has for it.

    Attributes:
        pages: whole answers by path, head and all; a callable writes as it likes.
        hosts: the Host header of every request.
    """

    pages: dict[str, Any]
    port: int = 0
    connects: int = 0
    hosts: list[str] = field(default_factory=list)

    def url(self, path: str, host: str = "pictures.test") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connects += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.hosts += [line[6:] for line in head.split("\r\n") if line.lower().startswith("host: ")]
            answer = self.pages[head.split()[1]]
            if callable(answer):
                await answer(reader, writer)
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def page(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None, **pages: Any) -> AsyncIterator[Site]:
    made = Site({f"/{name.replace('_', '.')}": answer for name, answer in pages.items()})
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def resolver(**names: list[str] | list[list[str]]) -> Resolve:
    """Names to addresses; where there are several lists, one after the other."""
    asked: dict[str, int] = {}

    async def resolve(host: str, port: int) -> list[str]:
        known = names[host.replace(".", "_")]
        if isinstance(known[0], str):
            return [str(address) for address in known]
        asked[host] = asked.get(host, -1) + 1
        return list(known[min(asked[host], len(known) - 1)])

    return resolve


LOOPBACK = resolver(pictures_test=["127.0.0.1"], other_test=["127.0.0.1"], evil_test=["127.0.0.1"])


def fetcher(site: Site, resolve: Resolve = LOOPBACK, context: ssl.SSLContext | None = None, **options: Any) -> Fetcher:
    domains = f"pictures.test:{site.port},other.test:{site.port}"
    options = {"allowed_media_domains": domains, "allowed_media_private_networks": "127.0.0.0/8"} | options
    return Fetcher(GatewayConfig(llm="h:1", **options), resolve, context)


async def get(fetching: Fetcher, *urls: str) -> list[bytes]:
    parts = tuple(MediaPart(f"messages[0].parts[{i}].image", Modality.IMAGE, url) for i, url in enumerate(urls))
    sampling = read_sampling(sampling_pb2.SamplingParams(), {}, 1000)
    found, seconds = await fetching.fetched(Conversation((Message("user", parts),), sampling))
    assert seconds > 0
    return [part.source for part in found.messages[0].parts]  # type: ignore[union-attr,misc]
