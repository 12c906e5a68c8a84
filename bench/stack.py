"""The engine under test, stepped by hand. The one file of the benchmarks that knows how an engine is put together."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.load import Ask
from services.llm import engine as engine_module
from services.llm.config import LlmConfig
from services.llm.engine import Engine, Request
from services.llm.events import Stream, Token
from services.llm.kv_cache import KvCache
from services.llm.layer_groups import Kind, LayerGroup
from services.llm.model_runner import ModelRunner, StepOutput
from services.llm.request import GenerateArguments
from services.llm.sampler import Sampling
from services.llm.scheduler import Chunk, Scheduler
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

    block_size = 16
    vocab_size = VOCAB
    groups = (LayerGroup(Kind.FULL, 64 * 260),)

    def __init__(self, most: int) -> None:
        self._logits = torch.randn(most, 64)
        self.merger = SimpleNamespace(family=SimpleNamespace(cross=False), features=1)
        self.pruning = None

    def add(self, *_: Any) -> list[tuple[int, int]]:
        """Nothing to merge."""
        return []

    remove = prepare = add

    def run(self, chunks: list[Chunk], scores: Any = ()) -> StepOutput:
        """The chunks that yield a token, and logits for them."""
        sampling = [c for c in chunks if c.samples]
        return StepOutput(sampling, self._logits[: len(sampling)], [], {})


class Stack:
    """An engine without its thread: requests go in, :meth:`step` computes, tokens come out."""

    def __init__(self, runner: Any, max_num_seqs: int, max_num_batched_tokens: int = 2048) -> None:
        kv = KvCache(list(runner.groups), runner.block_size)
        self.engine = Engine(runner, Scheduler(kv, max_num_batched_tokens, max_num_seqs))
        self.requests: list[Request] = []
        self._tokens: dict[int, list[int]] = defaultdict(list)

    def submit(self, ask: Ask) -> None:
        """Queue a request; it ends after ``ask.new_tokens`` tokens."""
        arguments = GenerateArguments(
            id=str(len(self.requests)), prompt=ask.prompt, max_tokens=ask.new_tokens, end_token_ids=frozenset(), min_tokens=0,
            priority=0, n=1, media=[], digests=[], salt=b"", sampling=Sampling(), grammar=None, include_first_logits=False,
            prompt_logprobs=None, visual_token_keep=None,
        )  # fmt: skip
        self.requests.append(Request(arguments, Stream(capacity=1 << 30)))
        self.engine._add(self.requests[-1])

    def step(self) -> bool:
        """One step; False when nothing is left."""
        busy = self.engine.step()
        for request, event in self.engine._outbox:
            if isinstance(event, Token):
                self._tokens[id(request)].append(event.choice.token)
        self.engine._outbox.clear()
        return busy

    def tokens(self, index: int) -> list[int]:
        """What request ``index`` has generated since the last call."""
        return self._tokens.pop(id(self.requests[index]), [])

    def close(self) -> None:
        """End every request."""
        for request in self.requests:
            self.engine._remove(request)

    def time_outside(self, watch: Stopwatch) -> None:
        """Have ``watch`` count the model's work, which is not bookkeeping; the choice of tokens is every engine's at once."""
        watch.wrap(self.engine.runner, "run")


class Stopwatch:
    """Adds up the CPU seconds spent inside chosen methods; as a context, inside the choice of tokens too."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._choose = engine_module.choose

    def __enter__(self) -> Stopwatch:
        self.wrap(engine_module, "choose")
        return self

    def __exit__(self, *_: object) -> None:
        engine_module.choose = self._choose

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
