"""The engine under test, stepped by hand. The one file of the benchmarks that knows how an engine is put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.load import Ask
from services.llm.block_manager import BlockManager
from services.llm.config import LlmConfig
from services.llm.engine import Engine, Request, Token
from services.llm.model_runner import ModelRunner
from services.llm.sampler import Sampling
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Sequence
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers

VOCAB = 49152


def make_model(folder: Path) -> Path:
    """A random Llama of 135 million parameters (30 layers of width 576, 9 heads on 3), written once."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=VOCAB,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_runner(model: Path, dtype: str, max_model_len: int = 1024) -> ModelRunner:
    """The language model, as the service loads it."""
    config = LlmConfig(model=str(model), dtype=dtype, device="cpu", max_model_len=max_model_len, kv_cache_memory_bytes=2 << 30)
    return ModelRunner(open_checkpoint(str(model)), config)


class InstantRunner:
    """Stands in for a model that takes no time: what remains of a step is scheduling and bookkeeping."""

    num_blocks, block_size = 64 * 260, 16

    def __init__(self, most: int) -> None:
        self._logits = torch.randn(most, 64)

    def add(self, *_: Any) -> None:
        """Nothing to merge."""

    remove = clear_blocks = write_rows = add

    def run(self, chunks: list[Chunk]) -> tuple[list[Chunk], torch.Tensor]:
        """The chunks that yield a token, and logits for them."""
        sampling = [c for c in chunks if c.samples]
        return sampling, self._logits[: len(sampling)]


class Stack:
    """An engine without its thread: requests go in, :meth:`step` computes, tokens come out."""

    def __init__(self, runner: Any, max_num_seqs: int, max_num_batched_tokens: int = 2048) -> None:
        blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.engine = Engine(runner, Scheduler(blocks, max_num_batched_tokens, max_num_seqs))
        self.requests: list[Request] = []

    def submit(self, ask: Ask) -> None:
        """Queue a request; it ends after ``ask.new_tokens`` tokens."""
        name = f"bench-{id(self)}-{len(self.requests)}"
        self.requests.append(Request(Sequence(name, ask.prompt, ask.new_tokens, frozenset()), [], Sampling()))
        self.engine._add(self.requests[-1])

    def step(self) -> bool:
        """One step; False when nothing is left."""
        busy = self.engine.step()
        for request, event in self.engine._outbox:
            request.events.put_nowait(event)
        self.engine._outbox.clear()
        return busy

    def tokens(self, index: int) -> list[int]:
        """What request ``index`` has generated since the last call."""
        events = self.requests[index].events
        got = [events.get_nowait() for _ in range(events.qsize())]
        return [event.id for event in got if isinstance(event, Token)]

    def close(self) -> None:
        """End every request."""
        for request in self.requests:
            self.engine._remove(request)

    def time_outside(self, watch: Stopwatch) -> None:
        """Have ``watch`` count the model's work and the choice of tokens, which are not bookkeeping."""
        watch.wrap(self.engine.runner, "run")
        for request in self.requests:
            watch.wrap(request.chooser, "choose")


class Stopwatch:
    """Adds up the CPU seconds spent inside chosen methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        """Count calls of ``owner.name`` from now on; they must not call one another."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        setattr(owner, name, timed)
