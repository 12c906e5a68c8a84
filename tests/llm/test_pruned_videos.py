"""Videos of which the encoder dropped rows: tokens equal the whole decoder's, given the rows and positions that are left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from services.llm.engine import Engine, Request
from services.llm.events import EngineFailure, Finished, Stream, Token
from services.llm.kv_cache import KvCache
from services.llm.merge import MediaRun
from services.llm.scheduler import Scheduler
from services.models.media import Modality
from tests.llm.families import Ask, Case, load_case
from tests.reference import NEW_TOKENS, Oracle

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"]


@dataclass(frozen=True)
class Pruned:
    """A request whose videos lost rows; ``kept`` by run, ``columns`` of the whole prompt that are left."""

    ask: Ask
    kept: dict[int, torch.Tensor]
    columns: torch.Tensor


def prune(ask: Ask, random: Random) -> Pruned:
    media: list[MediaRun] = []
    features, kept = [], {}
    left = torch.ones(len(ask.answer.prompt), dtype=torch.bool)
    for item, (run, rows) in enumerate(zip(ask.media, ask.features, strict=True)):
        dropped = int((~left).sum())
        if run.modality is Modality.VIDEO and run.grid.t > 1:
            count = random.randint(run.rows // run.grid.t, run.rows - 1)
            kept[item] = torch.tensor(sorted(random.sample(range(run.rows), count)))
            left[run.offset : run.stop] = False
            left[run.offset + kept[item]] = True
            run = replace(run, rows=count, tokens=count, whole_rows=run.rows)
            rows = [feature[kept[item]] for feature in rows]
        media.append(replace(run, offset=run.offset - dropped))
        features.append(rows)
    columns = left.nonzero().flatten()
    prompt = [ask.answer.prompt[column] for column in columns]
    return Pruned(Ask(replace(ask.answer, prompt=prompt), media, features), kept, columns)


@torch.no_grad()
def expected(oracle: Oracle, ask: Ask, pruned: Pruned) -> list[int]:
    """Greedy, without a cache: what the whole model gives its decoder, less what was dropped."""
    decoder = oracle.model.base_model.language_model
    given: dict[str, Any] = {}

    def note(_module: Any, _args: Any, arguments: dict[str, Any]) -> None:
        given.update(arguments)

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    oracle.model(**ask.answer.inputs)
    handle.remove()
    embeds = given["inputs_embeds"][:, pruned.columns]
    positions = given["position_ids"][-3:][..., pruned.columns]
    following, tokens = int(given["position_ids"][-3:].max()) + 1, []
    for _ in range(NEW_TOKENS):
        hidden = decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
        tokens.append(int(oracle.model.lm_head(hidden[0, -1]).argmax()))
        embeds = torch.cat([embeds, oracle.model.get_input_embeddings()(torch.tensor([tokens[-1:]]))], dim=1)
        positions = torch.cat([positions, torch.full((3, 1, 1), following)], dim=-1)
        following += 1
    return tokens


async def tokens(request: Request) -> list[int]:
    found: list[int] = []
    while True:
        for event in await asyncio.wait_for(request.events.take(), 60):
            assert not isinstance(event, EngineFailure), event
            if isinstance(event, Token):
                found.append(event.choice.token)
            if isinstance(event, Finished) and event.last:
                return found


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> tuple[Case, list[Pruned], list[list[int]]]:
    path = checkpoint_dir(request.param)
    case, oracle, random = load_case(path, 8), Oracle(path), Random(4)
    asks = [ask for ask in case.asks if any(run.modality is Modality.VIDEO and run.grid.t > 1 for run in ask.media)]
    assert len(asks) >= 2
    pruned = [prune(ask, random) for ask in asks]
    return case, pruned, [expected(oracle, ask, less) for ask, less in zip(asks, pruned, strict=True)]


@pytest.mark.asyncio
@pytest.mark.parametrize("budget", [4096, 13])
async def test_tokens_are_those_of_the_rows_and_positions_that_are_left(served: Any, budget: int) -> None:
    case, pruned, answers = served
    groups = [type(g)(g.kind, g.blocks, g.window) for g in case.runner.groups]
    engine = Engine(case.runner, Scheduler(KvCache(groups, case.runner.block_size, b"model"), budget, 8))
    engine.start(asyncio.get_running_loop())
    try:
        for _ in range(2):  # the second time from the prefix cache
            requests = []
            for number, less in enumerate(pruned):
                request = Request(less.ask.arguments(f"r{number}"), Stream())
                engine.submit(request)
                for item, features in enumerate(less.ask.features):
                    if item in less.kept:
                        engine.keep_rows(request, item, less.kept[item])
                    for feature, rows in enumerate(features):
                        engine.write_rows(request, item, feature, rows)
                requests.append(request)
            assert [await tokens(request) for request in requests] == answers
    finally:
        await asyncio.to_thread(engine.stop)
    assert engine.scheduler.kv.hits > 0
