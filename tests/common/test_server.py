"""Readiness as the health service tells it."""

from __future__ import annotations

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
