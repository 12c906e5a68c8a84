"""Channels between services."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import channel as channel_module
from services.common.channel import open_channel
from services.common.server import SERVER_OPTIONS
from tests.patience import PATIENCE

QUICK = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 1_500, "grpc.http2.ping_timeout_ms": 1_500}


@pytest.mark.asyncio
async def test_a_proxy_for_the_web_is_not_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


PING = 17  # bytes of an HTTP/2 ping, with its header


class Network:
    """A hop between a channel and a server that can fall silent, as when a machine or a cable is gone: nothing is closed."""

    def __init__(self, port: int) -> None:
        self._port, self._silent = port, False
        self.pings, self.pinged = 0, asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, onward_writer, True), self._pass(onward_reader, writer, False))

    def fall_silent(self) -> None:
        self._silent = True

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, from_client: bool) -> None:
        while data := await reader.read(65536):
            if self._silent:
                continue
            if from_client and len(data) == PING:
                self.pings += 1
                if self.pings >= 4:
                    self.pinged.set()
            writer.write(data)
        writer.close()


@pytest.mark.asyncio
async def test_a_peer_that_falls_silent_is_found_out_and_one_that_only_waits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [(name, QUICK.get(name, value)) for name, value in channel_module._CHANNEL_OPTIONS]
    assert set(QUICK) < {name for name, _ in options}
    monkeypatch.setattr(channel_module, "_CHANNEL_OPTIONS", options)

    async def quiet(request: bytes, context: Any) -> Any:
        yield b"begun"
        await asyncio.Event().wait()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(quiet)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": handler}),))
    network = Network(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    hop = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    try:
        async with open_channel(f"127.0.0.1:{hop.sockets[0].getsockname()[1]}") as channel:
            call: Any = channel.unary_stream("/a/b")(b"")
            assert await call.read() == b"begun"
            await asyncio.wait_for(network.pinged.wait(), PATIENCE)  # more than the server's default would allow
            assert not call.done()
            network.fall_silent()
            since = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await asyncio.wait_for(call.read(), PATIENCE)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() - since < 20  # not gRPC's minute
    finally:
        hop.close()
        await server.stop(0)
