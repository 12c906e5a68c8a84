"""Wires the gateway together, and keeps its picture of the backends fresh."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import grpc
import prometheus_client

from services.common import logs
from services.common.server import Readiness
from services.gateway.admission import Ledger
from services.gateway.backends import Backends
from services.gateway.background import Background
from services.gateway.chat import Chat
from services.gateway.config import GatewayConfig
from services.gateway.gate import GateLimits
from services.gateway.http.door import Door
from services.gateway.http.routes import Routes
from services.gateway.http.server import HttpServer
from services.gateway.media import Probe
from services.gateway.metrics import LedgerCollector
from services.gateway.model import ServedModel
from services.gateway.servicer import ChatServicer
from triptych.gateway.v1 import gateway_pb2_grpc

logger = logging.getLogger(__name__)
POLL_SECONDS = 1.0
HTTP_STALL_SECONDS = 30.0  # that an HTTP client may neither send nor read
_LAST_RELEASES = 5.0  # seconds for giving back what the last requests held


class GatewayService:
    """What :func:`services.common.server.serve` runs."""

    name = "triptych.gateway.v1.ChatService"
    open_while_draining: frozenset[str] = frozenset()
    standing: frozenset[str] = frozenset()

    def __init__(self, config: GatewayConfig) -> None:
        model = ServedModel(config)
        self.backends = Backends(config.encoder_addresses, config.llm_addresses, model.checkpoint.fingerprint)
        limits = GateLimits(
            config.max_num_running,
            config.max_queued_requests,
            config.max_passed,
            config.max_media_bytes,
            config.kept_for_text,
        )
        self.ledger = Ledger(limits)
        self._collector = LedgerCollector(self.ledger)
        self.background = Background()
        self.probe = Probe(model, config)
        chat = Chat(model, config, self.probe, self.backends, self.ledger, self.background, config.tenants)
        self._servicer = ChatServicer(model, chat, self.ledger, config.tenants)
        self.http = self._http_server(model, config, chat) if config.http_port >= 0 else None
        self._poller: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_ChatServiceServicer_to_server(self._servicer, server)

    async def start(self, readiness: Readiness, address: str) -> None:
        prometheus_client.REGISTRY.register(self._collector)
        await self.probe.start()
        await self._poll(readiness)
        self._poller = asyncio.create_task(self._keep_polling(readiness))
        if self.http is not None:
            self.http.start()
            logs.event(logger, "serving http", http_address=self.http.address)

    async def settled(self) -> None:
        """Nobody needs the gateway but its callers; those over HTTP are known here only."""
        if self.http is not None:
            await self.http.drain()

    async def stop(self) -> None:
        if self.http is not None:
            await self.http.stop()
        if self._poller is not None:
            self._poller.cancel()
        with contextlib.suppress(KeyError):  # it was never started, or is stopped already
            prometheus_client.REGISTRY.unregister(self._collector)
        await self.probe.stop()
        await self.background.finish(_LAST_RELEASES)
        await self.backends.close()

    def _http_server(self, model: ServedModel, config: GatewayConfig, chat: Chat) -> HttpServer:
        routes = Routes(model, chat, self._servicer, config.max_text_bytes, lambda: self.backends.ready)
        door = Door(routes.table, routes.check_caller, config.max_http_body_bytes, config.max_media_bytes, HTTP_STALL_SECONDS)
        return HttpServer(door, config.host, config.http_port)

    async def _keep_polling(self, readiness: Readiness) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll(readiness)

    async def _poll(self, readiness: Readiness) -> None:
        await self.backends.refresh()
        self._publish()
        if readiness.ready != self.backends.ready:
            await readiness.set(self.backends.ready)

    def _publish(self) -> None:
        """Budgets from what the backends say of themselves."""
        for address, llm in self.backends.llms.items():
            if llm.ready and llm.load.block_size:
                self.ledger.update(
                    address,
                    total=llm.load.total_blocks,
                    block_size=llm.load.block_size,
                    batch_tokens=llm.load.max_num_batched_tokens,
                    max_sequences=llm.load.max_num_seqs,
                )
            else:
                self.ledger.close(address)
        loads = [encoder.load for encoder in self.backends.encoders if encoder.ready]
        self.ledger.update_encoders(
            batch_patches=sum(load.max_num_batched_patches for load in loads),
            max_items=sum(load.max_pending_items for load in loads),
            max_bytes=sum(load.max_held_bytes for load in loads),
        )
