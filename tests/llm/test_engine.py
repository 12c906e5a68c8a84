"""The engine against ``generate()``: packed, in chunks that cut pictures, with late rows, preempted; tokens and logits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.llm.block_manager import BlockManager
from services.llm.config import LlmConfig
from services.llm.engine import Engine, EngineFailure, Finished, Request, Token
from services.llm.merge import MediaRun
from services.llm.model_runner import ModelRunner
from services.llm.sampler import Sampling
from services.llm.scheduler import Scheduler
from services.llm.sequence import Finish, RowSpan, Sequence
from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.media import Grid, Modality
from tests.reference import NEW_TOKENS, Answer, Oracle, asks

FAMILIES = ["qwen2_vl", "llava", "llama", "qwen2"]


@dataclass
class Case:
    """A loaded half with requests and what the oracle says to them."""

    checkpoint: Checkpoint
    runner: ModelRunner
    answers: list[Answer]
    features: list[list[torch.Tensor]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> Case:
    path = checkpoint_dir(request.param)
    checkpoint = open_checkpoint(str(path))
    oracle = Oracle(path)
    answers = [oracle.answer(ask) for ask in asks(5, 5, oracle.multimodal)]
    features = [oracle.features(a.inputs) for a in answers]
    config = LlmConfig(dtype="float32", block_size=4, kv_cache_memory_bytes=64 << 20)
    return Case(checkpoint, ModelRunner(checkpoint, config), answers, features)


def make_request(case: Case, index: int, name: str, **options: object) -> Request:
    answer = case.answers[index]
    media, at = [], 0
    for i, rows in enumerate(case.features[index]):
        at = answer.prompt.index(case.checkpoint.placeholder_id(Modality.IMAGE), at)
        grid = answer.inputs["image_grid_thw"][i].tolist() if "image_grid_thw" in answer.inputs else [1, 1, len(rows)]
        media.append(MediaRun(Modality.IMAGE, at, len(rows), Grid(*grid)))
        at += len(rows)
    spans = [RowSpan(run.offset, run.rows) for run in media]
    sequence = Sequence(name, answer.prompt, NEW_TOKENS, frozenset(), spans=spans)
    return Request(sequence, media, Sampling(), include_first_logits=True, **options)  # type: ignore[arg-type]


def new_engine(case: Case, budget: int, blocks: int | None = None, seqs: int = 8) -> Engine:
    return Engine(case.runner, Scheduler(BlockManager(blocks or case.runner.num_blocks, case.runner.block_size), budget, seqs))


async def collect(request: Request) -> tuple[list[int], torch.Tensor, Finished]:
    tokens, logits = [], None
    while True:
        event = await asyncio.wait_for(request.events.get(), 60)
        if isinstance(event, Finished):
            assert logits is not None
            return tokens, logits, event
        assert isinstance(event, Token), event
        logits = event.logits if logits is None else logits
        tokens.append(event.id)


async def check_all(case: Case, engine: Engine, rows_per_write: int) -> None:
    engine.start(asyncio.get_running_loop())
    requests = [make_request(case, i, f"r{i}") for i in range(len(case.answers))]
    for request in requests:
        engine.submit(request)
    for request, features in reversed(list(zip(requests, case.features, strict=True))):
        for span, rows in enumerate(features):
            for part in rows.split(rows_per_write):
                engine.write_rows(request, span, part)
    results = [await collect(r) for r in requests]
    await asyncio.to_thread(engine.stop)
    for answer, (tokens, logits, _) in zip(case.answers, results, strict=True):
        assert tokens == answer.tokens
        assert float((logits[0] - answer.first_logits).abs().max()) < 1e-4
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.total
    assert not case.runner._prompts


@pytest.mark.asyncio
@pytest.mark.parametrize(("budget", "rows_per_write"), [(4096, 10_000), (37, 50)])
async def test_tokens_and_logits_equal_generate(case: Case, budget: int, rows_per_write: int) -> None:
    await check_all(case, new_engine(case, budget), rows_per_write)


@pytest.mark.asyncio
async def test_preemption_changes_nothing(case: Case) -> None:
    longest = max(len(a.prompt) for a in case.answers) + NEW_TOKENS
    engine = new_engine(case, 4096, blocks=-(-longest // case.runner.block_size) + 2)
    await check_all(case, engine, 10_000)
    if not case.checkpoint.family.modalities:  # prompts of like length: the pool runs out while both decode
        assert engine.scheduler.preemptions > 0


@pytest.mark.asyncio
async def test_abort_at_any_time_frees_everything(case: Case) -> None:
    engine = new_engine(case, 16)
    engine.start(asyncio.get_running_loop())
    withheld = make_request(case, 3, "withheld")
    engine.submit(withheld)
    running = make_request(case, 0, "running")
    engine.submit(running)
    await collect(running)
    engine.abort(withheld)
    engine.abort(withheld)
    await asyncio.to_thread(engine.stop)
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.total
    assert not engine.scheduler.waiting and not engine.scheduler.running


@pytest.mark.asyncio
async def test_nan_rows_fail_their_own_request_only(case: Case) -> None:
    engine = new_engine(case, 4096)
    engine.start(asyncio.get_running_loop())
    sick, well, later = (make_request(case, 0, name) for name in ("sick", "well", "later"))
    sick.sequence.spans = [RowSpan(2, 3)]  # three of its rows come from outside, and are not numbers
    engine.submit(sick)
    engine.submit(well)
    engine.write_rows(sick, 0, torch.full((3, case.runner.hidden_size), float("nan")))
    assert (await collect(well))[0] == case.answers[0].tokens
    assert isinstance(await asyncio.wait_for(sick.events.get(), 60), EngineFailure)
    engine.submit(later)  # takes over the blocks of the sick one
    assert (await collect(later))[0] == case.answers[0].tokens
    await asyncio.to_thread(engine.stop)
    assert engine.scheduler.blocks.free == engine.scheduler.blocks.total


@pytest.mark.asyncio
async def test_a_seed_gives_the_same_tokens_alone_and_in_company(case: Case) -> None:
    def sampled(name: str, seed: int) -> Request:
        request = make_request(case, 0, name)
        return Request(request.sequence, request.media, Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=seed), True)

    async def run(requests: list[Request]) -> list[list[int]]:
        engine = new_engine(case, 64)
        engine.start(asyncio.get_running_loop())
        for request in requests:
            engine.submit(request)
        results = [(await collect(r))[0] for r in requests]
        await asyncio.to_thread(engine.stop)
        return results

    (alone,) = await run([sampled("a", 5)])
    company = await run([sampled(str(i), i) for i in range(8)])
    assert company[5] == alone
    assert len({tuple(t) for t in company}) > 4


@pytest.mark.asyncio
async def test_length_and_stop_are_told_apart(case: Case) -> None:
    engine = new_engine(case, 64)
    engine.start(asyncio.get_running_loop())
    long = make_request(case, 0, "long")
    short = make_request(case, 0, "short")
    short.sequence.end_token_ids = frozenset({case.answers[0].tokens[2]})
    engine.submit(long)
    engine.submit(short)
    assert (await collect(long))[2].reason is Finish.LENGTH
    tokens, _, finished = await collect(short)
    assert finished.reason is Finish.STOP and tokens == case.answers[0].tokens[: len(tokens)]
    await asyncio.to_thread(engine.stop)
