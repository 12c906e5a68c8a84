"""Wires the language model service together."""

from __future__ import annotations

import asyncio
import logging
import os

import grpc

from services.common import logs
from services.common.server import Readiness
from services.llm.block_manager import BlockManager
from services.llm.config import LlmConfig
from services.llm.embeddings import RowFetcher
from services.llm.engine import Engine
from services.llm.model_runner import ModelRunner
from services.llm.scheduler import Scheduler
from services.llm.servicer import LlmServicer
from services.models.checkpoint import open_checkpoint
from triptych.llm.v1 import llm_pb2, llm_pb2_grpc

logger = logging.getLogger(__name__)


class LlmService:
    """The language-model half of a checkpoint behind gRPC."""

    name = llm_pb2.DESCRIPTOR.services_by_name["LlmService"].full_name
    open_while_draining = frozenset({"Abort"})

    def __init__(self, config: LlmConfig) -> None:
        checkpoint = open_checkpoint(config.model)
        logs.event(logger, "loading", model=checkpoint.name, family=checkpoint.family.model_type)
        runner = ModelRunner(checkpoint, config)
        blocks = BlockManager(runner.num_blocks, config.block_size)
        self.engine = Engine(runner, Scheduler(blocks, config.max_num_batched_tokens, config.max_num_seqs))
        self.fetcher = RowFetcher(checkpoint.fingerprint, runner.hidden_size)
        self.servicer = LlmServicer(self.engine, self.fetcher, checkpoint, config.seed)
        logs.event(
            logger, "loaded", parameter_bytes=runner.parameter_bytes, kv_blocks=blocks.total, block_size=blocks.block_size,
            max_model_len=runner.max_model_len, device=runner.device, dtype=str(runner.dtype),
        )  # fmt: skip

    def register(self, server: grpc.aio.Server) -> None:
        llm_pb2_grpc.add_LlmServiceServicer_to_server(self.servicer, server)

    async def start(self, readiness: Readiness, address: str) -> None:
        # Without its engine the process would go on looking healthy while every request hangs.
        self.engine.start(asyncio.get_running_loop(), died=lambda: os._exit(70))
        await readiness.set(True)

    async def settled(self) -> None:
        """Every accepted request is a call in flight."""

    async def stop(self) -> None:
        await self.fetcher.close()
        await asyncio.to_thread(self.engine.stop)
