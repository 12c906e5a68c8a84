"""Runs one gRPC service in a process: uvloop, health, reflection, metrics, and a graceful end on SIGTERM or SIGINT.

Health follows grpc.health.v1: "" is liveness, the service's full name is readiness.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc
import prometheus_client
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import logs
from services.common.channel import MESSAGE_OPTIONS
from services.common.config import ServiceConfig
from services.common.interceptor import ServiceInterceptor

logger = logging.getLogger(__name__)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Services ping each other every other second; without the first option a server calls that abuse and closes the connection.
SERVER_OPTIONS = [
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
    *MESSAGE_OPTIONS,
]


class Readiness:
    """Lets a service say whether it can serve; what the health service reports."""

    def __init__(self, servicer: health.aio.HealthServicer, name: str) -> None:
        self._servicer, self._name = servicer, name
        self.ready, self.alive, self._ended = False, True, False
        self._was_ready = False

    async def set_alive(self, alive: bool) -> None:
        """Report liveness, under the empty name; a process that is not alive is not ready either."""
        if self.alive and not alive:
            self._was_ready = self.ready
        self.alive = alive
        await self._servicer.set("", SERVING if alive else NOT_SERVING)
        await self.set(alive and self._was_ready)

    async def set(self, ready: bool) -> None:
        """Report SERVING or NOT_SERVING under the service's full name; the latter always, once the service is ending."""
        ready = ready and not self._ended
        if ready != self.ready:
            logs.event(logger, "ready" if ready else "not ready")
        self.ready = ready
        await self._servicer.set(self._name, SERVING if ready else NOT_SERVING)

    async def end(self) -> None:
        """Not ready from here on, whatever a service that still looks at its backends finds."""
        self._ended = True
        await self.set(False)


class Service(Protocol):
    """What :func:`serve` runs."""

    name: str  # full gRPC name, such as triptych.llm.v1.LlmService
    open_while_draining: frozenset[str]  # methods that running requests still need after SIGTERM
    standing: frozenset[str]  # methods whose calls last as long as their callers do, and are no work by themselves

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer to the server."""

    async def start(self, readiness: Readiness, address: str) -> None:
        """Called once the server listens on ``address`` (host:port); set readiness when it can serve."""

    async def settled(self) -> None:
        """Wait until nothing that was accepted earlier needs this service, calls in flight aside."""

    async def stop(self) -> None:
        """Called after the last call ended; free everything."""


def serve(service_name: str, config: ServiceConfig, build: Callable[[], Service]) -> None:
    """Run until SIGTERM or SIGINT, then drain and return; the process should exit with code 0.

    Args:
        service_name: short name for the logs, such as "encoder".
        config: where to listen.
        build: makes the service inside the event loop, loading what it needs; an exception ends the process with code 1.
    """
    logs.configure(service_name, config.log_level)
    uvloop.run(_serve(config, build))


async def _serve(config: ServiceConfig, build: Callable[[], Service]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = build()
    # What is here stays to the end. A full collection goes through all of it, and requests stand still meanwhile: 180 ms in a
    # language model's process, 13 ms in a gateway's. Frozen objects are not looked at again.
    gc.collect()
    gc.freeze()
    interceptor = ServiceInterceptor(service.open_while_draining, config.max_held_request_bytes, service.standing)
    server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    service.register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((service.name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    await health_servicer.set("", SERVING)
    readiness = Readiness(health_servicer, service.name)
    await readiness.set(False)
    port = _bind(server, config)
    await server.start()
    address = f"{config.host}:{port}"
    if config.metrics_port:
        prometheus_client.start_http_server(config.metrics_port, config.host)
    await service.start(readiness, address)
    logs.event(logger, "serving", address=address, pid=os.getpid())
    await stop.wait()
    await drain(server, interceptor, readiness, service.settled, config.grace_seconds)
    await service.stop()
    logs.event(logger, "stopped")


async def drain(
    server: grpc.aio.Server,
    interceptor: ServiceInterceptor,
    readiness: Readiness,
    settled: Callable[[], Awaitable[None]],
    grace: float,
) -> None:
    """Refuse new calls, let running work finish within ``grace`` seconds, then end what is left."""
    logs.event(logger, "draining", in_flight=interceptor.in_flight, grace_seconds=grace)
    interceptor.draining = True
    await readiness.end()
    try:
        async with asyncio.timeout(grace):
            await settled()
            await interceptor.idle.wait()
    except TimeoutError:
        logs.event(logger, "grace period over", logging.WARNING, in_flight=interceptor.in_flight)
    # Standing calls never end by themselves; a second lets clients read what was sent last.
    await server.stop(1.0)


def _bind(server: grpc.aio.Server, config: ServiceConfig) -> int:
    try:
        return server.add_insecure_port(f"{config.host}:{config.port}")
    except RuntimeError as error:
        raise SystemExit(
            f"cannot listen on {config.host}:{config.port}: the port is taken, or the address is not "
            "this machine's; choose another --port"
        ) from error
