"""Every family against ``generate()``: whole prompts, chunks, prefix reuse, preemption, two answers; tokens and all logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.llm.attention import choose_backend
from services.llm.engine import Engine, Request
from services.llm.events import Accepted, Finished, Token
from services.llm.kv_cache import KvCache
from services.llm.scheduler import Scheduler
from services.models.registry import FAMILIES, Attention
from tests.llm.families import Ask, Case, load_case

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> Case:
    if request.param == "phi3":  # generate() changes its rotary frequencies at 64 tokens, see test_rope
        return load_case(checkpoint_dir("phi3"), 14, range(65, 300))
    options = {"max_model_len": 4096} if request.param == "phi4_multimodal" else {}  # as far as its first frequencies reach
    return load_case(checkpoint_dir(request.param), **options)


class Stepped:
    """An engine stepped by hand, so that every step's logits can be seen; rows arrive in pieces between steps.

    Attributes:
        cached: prompt tokens found in the prefix cache, of all requests.
        largest: most sequences in one step.
    """

    def __init__(self, case: Case, threshold: int = 0, backend: str = "auto") -> None:
        self.case, self.runner = case, case.runner
        self.runner.builder.backend = choose_backend(backend, "cpu")
        kv = KvCache(self.runner.groups, self.runner.block_size, b"model")
        self.scheduler = Scheduler(kv, 8192, 8, long_prefill_token_threshold=threshold)
        self.engine = Engine(self.runner, self.scheduler)
        self.cached = self.largest = self.steps = 0

    def check(
        self, asks: list[Ask], n: int = 1, rows: int = 10_000, before_step: Callable[[int], None] = lambda step: None
    ) -> None:
        """Serve all at once: tokens and every step's logits equal the oracle's, and everything is given back."""
        assert self.tokens(asks, n, rows, before_step) == [[ask.answer.tokens] * n for ask in asks]

    def tokens(
        self,
        asks: list[Ask],
        n: int = 1,
        rows: int = 10_000,
        before_step: Callable[[int], None] = lambda step: None,
        check: bool = True,
    ) -> list[list[list[int]]]:
        """Serve all at once: the tokens of every answer. ``check``: every step's logits are the oracle's."""
        requests = [Request(ask.arguments(str(i), n=n)) for i, ask in enumerate(asks)]
        tokens: list[list[list[int]]] = [[[] for _ in range(n)] for _ in asks]
        arriving = [(request, self._pieces(ask, rows)) for request, ask in zip(requests, asks, strict=True)]
        unfinished = n * len(asks)
        for request in requests:
            self.engine.submit(request)
        while unfinished:
            for request, pieces in arriving:
                for item, feature, part in pieces.pop(0) if pieces else ():
                    self.engine.write_rows(request, item, feature, part)
            assert self.engine._drain_commands(wait=False)
            before_step(self.steps)
            self._step({id(r.arguments.prompt): ask for r, ask in zip(requests, asks, strict=True)} if check else {})
            for request, event in self.engine._outbox:
                match event:
                    case Token():
                        tokens[requests.index(request)][event.index].append(event.choice.token)
                    case Finished():
                        unfinished -= 1
                        self.cached += event.cached_tokens
                    case _:
                        assert isinstance(event, Accepted), event
            self.engine._outbox.clear()
            self.scheduler.check_integrity()
        assert all(pool.available == pool.total for pool in self.scheduler.kv.pools)
        assert not self.runner._prompts
        return tokens

    def _step(self, asks: dict[int, Ask]) -> None:
        self.steps += 1
        chunks = self.scheduler.schedule()
        self.runner.prepare(self.scheduler.kv.take_copies(), self.scheduler.kv.take_stale())
        if not chunks:
            return  # rows are still on their way
        output = self.runner.run(chunks)
        assert not output.broken
        for chunk, row in zip(output.sampling, output.logits, strict=True):
            if ask := asks.get(id(chunk.sequence.prompt)):
                assert float((row - ask.answer.logits[len(chunk.sequence.output)]).abs().max()) < TOLERANCE
        self.engine._postprocess(chunks, output)
        self.largest = max(self.largest, len(chunks))

    @staticmethod
    def _pieces(ask: Ask, rows: int) -> list[list[tuple[int, int, torch.Tensor]]]:
        """What arrives together: the next rows of every feature of an item."""
        return [
            [(item, feature, part) for feature, part in enumerate(parts)]
            for item, features in enumerate(ask.features)
            for parts in zip(*(feature.split(rows) for feature in features), strict=True)
        ]


@pytest.mark.parametrize("backend", ["naive", "auto"])
def test_whole_prompts(case: Case, backend: str) -> None:
    run = Stepped(case, backend=backend)
    run.check(case.asks)
    assert run.largest >= 4
    if case.checkpoint.family.modalities:
        assert len({ask.features[0][0].numpy().tobytes() for ask in case.asks if ask.features}) >= 3


def test_chunks_of_seven(case: Case) -> None:
    Stepped(case, threshold=7).check(case.asks, rows=11)


def test_chunks_of_five_on_a_reused_prefix(case: Case) -> None:
    run = Stepped(case, threshold=5)
    run.check(case.asks)
    first, run.cached = run.cached, 0
    run.check(case.asks, rows=3)
    if case.checkpoint.family.attention is Attention.PREFIX:  # a prompt that sees itself whole is computed whole
        assert run.cached == 0
        return
    assert run.cached > first
    assert run.cached >= sum(len(a.answer.prompt) // 4 * 4 - 4 for a in case.asks if not a.features)


@pytest.mark.parametrize("seed", range(2))
def test_preempted_at_a_random_step(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    run = Stepped(case, threshold=[0, 9][seed])
    steps = rng.sample(range(1, 11), 4)

    def preempt(step: int) -> None:
        if step in steps and run.scheduler.running:
            run.scheduler.preempt(rng.choice(run.scheduler.running))

    run.check(case.asks, before_step=preempt)
    assert run.scheduler.preemptions > 0


def test_two_answers(case: Case) -> None:
    run = Stepped(case)
    run.check(case.asks[:4], n=2)
    assert run.largest >= 6
