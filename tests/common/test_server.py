"""Readiness as the health service tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from grpc_health.v1 import health, health_pb2

from services.common.server import NOT_SERVING, SERVING, Readiness


@pytest.mark.asyncio
async def test_a_service_that_ends_is_never_ready_again() -> None:
    servicer = health.aio.HealthServicer()
    readiness, request = Readiness(servicer, "service"), health_pb2.HealthCheckRequest(service="service")
    await readiness.set(True)
    assert (await servicer.Check(request, None)).status == SERVING
    await readiness.end()
    await readiness.set(True)  # as one does that found its backends well
    assert not readiness.ready and (await servicer.Check(request, None)).status == NOT_SERVING


SERVICE = """
import gc, os, signal
from services.common.config import ServiceConfig
from services.common.server import serve

class Service:
    name, open_while_draining, standing = "test.Service", frozenset(), frozenset()
    def __init__(self):
        self.built = [[] for _ in range(100_000)]
    def register(self, server):
        pass
    async def start(self, readiness, address):
        print(gc.get_freeze_count(), len(gc.get_objects()))  # the latter without frozen ones
        os.kill(os.getpid(), signal.SIGTERM)
    async def settled(self):
        pass
    async def stop(self):
        pass

serve("test", ServiceConfig(port=0), Service)
"""


def test_what_a_service_was_built_of_is_not_collected_again_and_again() -> None:
    run = subprocess.run([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    frozen, collected = map(int, next(line for line in run.stdout.splitlines() if not line.startswith("{")).split())
    assert collected < 10_000 < 100_000 < frozen
