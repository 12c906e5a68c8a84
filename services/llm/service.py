"""Wires the language model service together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

import grpc
import prometheus_client

from services.common import logs
from services.common.server import Readiness
from services.llm.config import LlmConfig
from services.llm.embeddings import RowFetcher
from services.llm.engine import Engine
from services.llm.kv_cache import KvCache
from services.llm.metrics import EngineCollector
from services.llm.model_runner import ModelRunner
from services.llm.scheduler import Scheduler
from services.llm.servicer import LlmServicer
from services.llm.structured import Grammars
from services.models.checkpoint import open_checkpoint
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

logger = logging.getLogger(__name__)
_STOP_SECONDS = 10.0  # for the step that runs when the service is told to stop


class LlmService:
    """The language-model half of a checkpoint behind gRPC."""

    name = llm_pb2.DESCRIPTOR.services_by_name["LlmService"].full_name
    open_while_draining = frozenset({"Abort"})
    standing = frozenset({"StreamResponses"})

    def __init__(self, config: LlmConfig) -> None:
        checkpoint = open_checkpoint(config.model)
        logs.event(logger, "loading", model=checkpoint.name, family=checkpoint.family.model_type)
        runner = ModelRunner(checkpoint, config)
        # keys of later layers depend on where pruning starts
        named = checkpoint.fingerprint + (f" fastv:K={runner.pruning.layer}" if runner.pruning else "")
        kv = KvCache(runner.groups, runner.block_size, named.encode(), config.enable_prefix_caching)
        scheduler = Scheduler(
            kv, config.max_num_batched_tokens, config.max_num_seqs,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )  # fmt: skip
        self.engine = Engine(runner, scheduler, config.decode_stretch)
        self.fetcher = RowFetcher(checkpoint.fingerprint, runner.hidden_size, runner.merger.features)
        placeholders = [checkpoint.placeholder_id(modality) for modality in checkpoint.family.modalities]
        self.grammars = Grammars(checkpoint.path, runner.vocab_size, checkpoint.end_token_ids, placeholders)
        self.servicer = LlmServicer(self.engine, self.fetcher, checkpoint, self.grammars, config)
        self._collector = EngineCollector(self.engine)
        self._watchdog_seconds = config.watchdog_seconds
        self._watchdog: asyncio.Task[None] | None = None
        logs.event(
            logger, "loaded", parameter_bytes=runner.parameter_bytes, block_size=runner.block_size,
            kv_blocks={group.kind.value: group.blocks for group in runner.groups},
            max_model_len=runner.max_model_len, device=runner.device, dtype=str(runner.dtype),
            cuda_graphs=runner.graphs is not None,
        )  # fmt: skip

    def register(self, server: grpc.aio.Server) -> None:
        llm_pb2_grpc.add_LlmServiceServicer_to_server(self.servicer, server)

    async def start(self, readiness: Readiness, address: str) -> None:
        # Without its engine the process would go on looking healthy while every request hangs.
        self.engine.start(asyncio.get_running_loop(), died=lambda: os._exit(70))
        prometheus_client.REGISTRY.register(self._collector)
        await readiness.set(True)
        if self._watchdog_seconds:
            self._watchdog = asyncio.create_task(self._watch(readiness))

    async def settled(self) -> None:
        """Every accepted request is a call in flight."""

    async def _watch(self, readiness: Readiness) -> None:
        """Liveness follows the steps: it fails while one takes too long, so that whoever supervises starts the process anew."""
        while True:
            await asyncio.sleep(min(1.0, self._watchdog_seconds / 4))
            started = self.engine.step_started
            stuck = started is not None and time.monotonic() - started > self._watchdog_seconds
            if stuck == readiness.alive:
                logs.event(logger, "a step hangs" if stuck else "steps go on", logging.ERROR if stuck else logging.INFO)
                await readiness.set_alive(not stuck)

    async def stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        with contextlib.suppress(KeyError):  # it was never started, or is stopped already
            prometheus_client.REGISTRY.unregister(self._collector)
        await self.fetcher.close()
        if not await asyncio.to_thread(self.engine.stop, _STOP_SECONDS):
            logs.event(logger, "a step hangs; the process ends without it", logging.ERROR)
        self.grammars.close()  # only now: steps use its threads
