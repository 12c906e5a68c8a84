"""The engine's thread and what it hands to the event loop: failures, aborts, forks, streams, and whose turn comes when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from services.llm.engine import Engine, Request
from services.llm.events import Accepted, EngineFailure, Event, Finished, PromptScores, Refused, Stream, Token
from services.llm.kv_cache import KvCache
from services.llm.model_runner import StepOutput
from services.llm.sampler import Sampling
from services.llm.scheduler import Chunk, Scheduler
from services.llm.sequence import Finish
from tests.llm.families import Ask, Case, load_case
from tests.patience import PATIENCE


@pytest.fixture(scope="module", params=["qwen2_vl", "llama"])
def case(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> Case:
    return load_case(checkpoint_dir(request.param))


def new_engine(case: Case, budget: int = 4096, blocks: int | None = None, seqs: int = 8) -> Engine:
    groups = [type(g)(g.kind, blocks or g.blocks, g.window) for g in case.runner.groups]
    return Engine(case.runner, Scheduler(KvCache(groups, case.runner.block_size, b"model"), budget, seqs))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)
        engine.scheduler.check_integrity()
        assert all(pool.available == pool.total for pool in engine.scheduler.kv.pools)
        assert not engine.runner._prompts and not engine.scheduler.waiting and not engine.scheduler.running


def submit(engine: Engine, ask: Ask, rows: bool = True, stream: Stream | None = None, **changes: object) -> Request:
    request = Request(ask.arguments("r", **changes), stream or Stream())
    engine.submit(request)
    if rows:
        write_rows(engine, request, ask)
    return request


def write_rows(engine: Engine, request: Request, ask: Ask) -> None:
    for item, features in enumerate(ask.features):
        for feature, rows in enumerate(features):
            engine.write_rows(request, item, feature, rows)


async def events(request: Request) -> AsyncIterator[Event]:
    """All events up to the last."""
    while True:
        for event in await asyncio.wait_for(request.events.take(), 60):
            yield event
            if (isinstance(event, Finished) and event.last) or isinstance(event, EngineFailure | Refused):
                return


async def tokens(request: Request) -> list[int]:
    return [event.choice.token async for event in events(request) if isinstance(event, Token)]


@pytest.mark.asyncio
@pytest.mark.parametrize("budget", [4096, 37])
async def test_served_at_once_all_equal_generate(case: Case, budget: int) -> None:
    async with running(new_engine(case, budget)) as engine:
        requests = [submit(engine, ask) for ask in case.asks]
        for request, ask in zip(requests, case.asks, strict=True):
            assert await tokens(request) == ask.answer.tokens


@pytest.mark.asyncio
async def test_a_pool_too_small_for_all_changes_no_token(case: Case) -> None:
    longest = max(len(ask.answer.prompt) for ask in case.asks) + 12
    async with running(new_engine(case, blocks=-(-longest // case.runner.block_size) + 6)) as engine:
        requests = [submit(engine, ask) for ask in case.asks]
        for request, ask in zip(requests, case.asks, strict=True):
            assert await tokens(request) == ask.answer.tokens


@pytest.mark.asyncio
async def test_abort_at_any_time_frees_everything(case: Case) -> None:
    async with running(new_engine(case, 16)) as engine:
        withheld = submit(engine, case.asks[2], rows=False)
        forked = submit(engine, case.asks[1], n=3)
        assert await tokens(submit(engine, case.asks[0])) == case.asks[0].answer.tokens
        for request in (withheld, forked, withheld):
            engine.abort(request)


@pytest.mark.asyncio
async def test_a_request_that_can_never_run_is_refused_with_figures(case: Case) -> None:
    async with running(new_engine(case, 4096, blocks=3)) as engine:
        event = [event async for event in events(submit(engine, case.asks[0]))][-1]
        assert isinstance(event, Refused) and "blocks" in str(event) and "3" in str(event)


@pytest.mark.asyncio
async def test_rows_that_are_not_numbers_fail_their_own_request_only(case: Case) -> None:
    ask = next((ask for ask in case.asks if ask.features), None)
    if ask is None:
        pytest.skip("a family without rows")
    async with running(new_engine(case)) as engine:
        sick, well = submit(engine, ask, rows=False), submit(engine, ask)
        engine.write_rows(sick, 0, 0, torch.full_like(ask.features[0][0], float("nan")))
        assert isinstance([event async for event in events(sick)][-1], EngineFailure)
        assert await tokens(well) == ask.answer.tokens


@pytest.mark.asyncio
async def test_values_that_are_not_numbers_fail_their_own_request_only(case: Case) -> None:
    async with running(new_engine(case, blocks=40 if not case.checkpoint.family.modalities else None)) as engine:
        add = case.runner.merger.merge

        def poisoned(prompt, media):  # type: ignore[no-untyped-def]
            merged = add(prompt, media)
            if prompt[-1] == 9:
                merged.embeds = torch.full_like(merged.embeds, float("nan"))
            return merged

        case.runner.merger.merge = poisoned  # type: ignore[method-assign]
        try:
            sick = submit(engine, case.asks[1], prompt=[5, 6, 7, 8] * 5 + [9], media=[], digests=[])
            well = submit(engine, case.asks[1])
            assert isinstance([event async for event in events(sick)][-1], EngineFailure)
            assert await tokens(well) == case.asks[1].answer.tokens
            for ask in case.asks:  # some take over the blocks of the sick one
                assert await tokens(submit(engine, ask)) == ask.answer.tokens
        finally:
            case.runner.merger.merge = add  # type: ignore[method-assign]


@pytest.mark.asyncio
async def test_a_request_that_breaks_its_step_ends_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.runner.run

    def breaks(chunks, scores=()):  # type: ignore[no-untyped-def]
        if any(chunk.sequence.prompt[-1] == 9 and len(chunk.sequence.output) == 3 for chunk in chunks):
            raise RuntimeError("out of memory, say")
        return run(chunks, scores)

    monkeypatch.setattr(case.runner, "run", breaks)
    async with running(new_engine(case)) as engine:
        sick = submit(engine, case.asks[1], prompt=[5, 6, 7, 8, 9], media=[], digests=[], n=2)
        well = [submit(engine, ask) for ask in case.asks]
        seen = [event async for event in events(sick)]
        assert isinstance(seen[-1], EngineFailure) and "out of memory" not in str(seen[-1])
        for request, ask in zip(well, case.asks, strict=True):
            assert await tokens(request) == ask.answer.tokens


@pytest.mark.asyncio
async def test_a_seed_gives_the_same_tokens_alone_and_in_company(case: Case) -> None:
    def sampled(engine: Engine, seed: int) -> Request:
        return submit(engine, case.asks[1], sampling=Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=seed))

    async with running(new_engine(case, 64)) as engine:
        alone = await tokens(sampled(engine, 5))
    async with running(new_engine(case, 64)) as engine:
        company = [await tokens(request) for request in [sampled(engine, seed) for seed in range(8)]]
    assert company[5] == alone
    assert len({tuple(t) for t in company}) > 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.9, top_p=0.95, seed=5),
        Sampling(temperature=0.7, seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    ],
    ids=["greedy", "seeded", "penalized"],
)
async def test_an_answer_that_began_elsewhere_goes_on_as_it_would_have(case: Case, sampling: Sampling) -> None:
    async with running(new_engine(case, 64)) as engine:
        for ask in case.asks[:2]:
            ending = ask.arguments("r").max_tokens // 2  # bans end tokens up to there, counted from the answer's first token
            options: dict[str, object] = {"sampling": sampling, "end_token_ids": frozenset({7}), "min_tokens": ending}
            whole = await tokens(submit(engine, ask, **options))
            for begun in {1, ending, len(whole) - 1} - {0}:
                request = submit(engine, ask, answer=tuple(whole[:begun]), **options)
                seen = [event async for event in events(request)]
                assert [event.choice.token for event in seen if isinstance(event, Token)] == whole[begun:]
                assert isinstance(seen[-1], Finished) and seen[-1].completion_tokens == len(whole)


@pytest.mark.asyncio
async def test_several_answers_are_drawn_apart_and_end_apart(case: Case) -> None:
    async with running(new_engine(case)) as engine:
        request = submit(engine, case.asks[0], n=4, sampling=Sampling(temperature=1.2, seed=3))
        seen = [event async for event in events(request)]
        answers = [[e.choice.token for e in seen if isinstance(e, Token) and e.index == index] for index in range(4)]
        assert len({tuple(answer) for answer in answers}) == 4
        endings = [event for event in seen if isinstance(event, Finished)]
        assert sorted(e.index for e in endings) == [0, 1, 2, 3] and [e.last for e in endings] == [False] * 3 + [True]


@pytest.mark.asyncio
async def test_length_and_stop_are_told_apart(case: Case) -> None:
    ask = case.asks[0]
    async with running(new_engine(case, 64)) as engine:
        end = ask.answer.tokens[2]
        long, short = submit(engine, ask), submit(engine, ask, end_token_ids=frozenset({end}))
        assert [e.reason async for e in events(long) if isinstance(e, Finished)] == [Finish.LENGTH]
        seen = [event async for event in events(short)]
        expected = ask.answer.tokens[: ask.answer.tokens.index(end) + 1]
        assert [e.choice.token for e in seen if isinstance(e, Token)] == expected
        assert [e.reason for e in seen if isinstance(e, Finished)] == [Finish.STOP]


@pytest.mark.asyncio
async def test_log_probabilities_of_prompt_and_answer_are_those_of_the_oracle(case: Case) -> None:
    ask = case.asks[1]
    async with running(new_engine(case, 8)) as engine:
        await tokens(submit(engine, ask))  # what it leaves in the prefix cache must not shorten the scores
        seen = [e async for e in events(submit(engine, ask, prompt_logprobs=2, sampling=Sampling(logprobs=3)))]
    logprobs = torch.log_softmax(ask.answer.logits, -1)
    for step, event in enumerate(e for e in seen if isinstance(e, Token)):
        top = logprobs[step].topk(3)
        assert event.choice.logprob == pytest.approx(float(top.values[0]), abs=1e-4)
        assert [token for token, _ in event.choice.top] == top.indices.tolist()
    (scores,) = [e for e in seen if isinstance(e, PromptScores)]
    assert [c.token for c in scores.choices] == ask.answer.prompt[1:]
    assert all(c.logprob is not None and c.logprob <= c.top[0][1] for c in scores.choices)


@pytest.mark.asyncio
async def test_a_reader_that_lags_stops_its_own_request_only(case: Case) -> None:
    async with running(new_engine(case)) as engine:
        slow = submit(engine, case.asks[1], stream=Stream(capacity=4))
        for _ in range(3):
            assert await tokens(submit(engine, case.asks[0])) == case.asks[0].answer.tokens
        assert slow.events.sent < 1 + 12  # it has not gone on
        taken: list[Event] = []
        while not (taken and isinstance(taken[-1], Finished)):
            taken += await asyncio.wait_for(slow.events.take(), 60)
            if slow.events.lagged and slow.events.caught_up:
                engine.resume(slow)
        assert [e.choice.token for e in taken if isinstance(e, Token)] == case.asks[1].answer.tokens


def step_until(engine: Engine, condition: Callable[[], bool], most: int = 500) -> int:
    """Steps by hand until something holds."""
    for count in range(most):
        if condition():
            return count
        assert engine._drain_commands(wait=False)
        engine.step()
    raise AssertionError("it never happened")


def sent(engine: Engine, request: Request) -> list[Event]:
    return [event for owner, event in engine._outbox if owner is request]


def test_a_short_request_gets_its_first_token_while_a_long_one_decodes(case: Case) -> None:
    engine = new_engine(case)
    long = submit(engine, case.asks[0], max_tokens=60)
    step_until(engine, lambda: len(sent(engine, long)) > 5)
    short = submit(engine, case.asks[1])
    assert step_until(engine, lambda: any(isinstance(e, Token) for e in sent(engine, short))) <= 2
    assert not any(isinstance(e, Finished) for e in sent(engine, long))
    step_until(engine, lambda: any(isinstance(e, Finished) for e in sent(engine, long)))


def test_a_prompt_cut_anew_after_a_preemption_is_scored_whole(case: Case) -> None:
    def scores(engine: Engine, request: Request) -> list[tuple[int, float | None]]:
        step_until(engine, lambda: any(isinstance(e, Finished) for e in sent(engine, request)))
        (found,) = [e for e in sent(engine, request) if isinstance(e, PromptScores)]
        return [(choice.token, choice.logprob) for choice in found.choices]

    ask, prompt = case.asks[1], [*range(100, 140)]
    plain: dict[str, object] = {"prompt": prompt, "media": [], "digests": [], "prompt_logprobs": 2}
    engine = new_engine(case, 8)
    undisturbed = scores(engine, submit(engine, ask, rows=False, **plain))
    assert [token for token, _ in undisturbed] == prompt[1:]

    engine = new_engine(case, 8)
    request = submit(engine, ask, rows=False, **plain)
    step_until(engine, lambda: len(request.prompt_scores) == 8)
    other = submit(engine, case.asks[1], priority=-1, max_tokens=40)
    engine.scheduler.preempt(request.answers[0].sequence)
    step_until(engine, lambda: len(sent(engine, other)) > 1)  # from now on it takes one token of every step's budget
    disturbed = scores(engine, request)
    assert [token for token, _ in disturbed] == prompt[1:]
    assert [p for _, p in disturbed] == pytest.approx([p for _, p in undisturbed], abs=1e-4)
    engine.abort(other)
    assert engine._drain_commands(wait=False)


def test_an_answer_that_is_not_numbers_fails_with_its_siblings_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(case)
    well, sick = submit(engine, case.asks[1]), submit(engine, case.asks[0], n=2)
    step_until(engine, lambda: len(sick.answers) == 2)
    late = submit(engine, case.asks[1], n=2)  # forks in the very step in which the other request fails
    run, broken = engine.runner.run, sick.answers[0].sequence

    def break_one(chunks: Sequence[Chunk], scores: Collection[str] = ()) -> StepOutput:
        output = run(chunks, scores)
        fine = [i for i, c in enumerate(output.sampling) if c.sequence is not broken]
        bad = [c for c in output.sampling if c.sequence is broken]
        return StepOutput([output.sampling[i] for i in fine], output.logits[fine], bad, output.scored)

    monkeypatch.setattr(engine.runner, "run", break_one)
    step_until(engine, lambda: all(any(isinstance(e, Finished) and e.last for e in sent(engine, r)) for r in (well, late)))
    assert isinstance(sent(engine, sick)[-1], EngineFailure) and not sick.answers
    for request, answers in ((well, 1), (late, 2)):
        for index in range(answers):
            said = [e.choice.token for e in sent(engine, request) if isinstance(e, Token) and e.index == index]
            assert said == case.asks[1].answer.tokens
    engine.scheduler.check_integrity()


@pytest.mark.asyncio
async def test_a_step_that_hangs_does_not_hold_up_the_stop(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, go_on, run = threading.Event(), threading.Event(), case.runner.run

    def hang(chunks: Sequence[Chunk], scores: Collection[str] = ()) -> StepOutput:
        hangs.set()
        assert go_on.wait(PATIENCE)
        return run(chunks, scores)

    monkeypatch.setattr(case.runner, "run", hang)
    async with running(new_engine(case)) as engine:
        request = submit(engine, case.asks[1], max_tokens=1)
        assert await asyncio.to_thread(hangs.wait, 60)
        assert not await asyncio.to_thread(engine.stop, 0.01)
        go_on.set()
        assert [e.reason async for e in events(request) if isinstance(e, Finished)] == [Finish.LENGTH]


def test_text_behind_withheld_rows_finishes_first(case: Case) -> None:
    pictured = next((ask for ask in case.asks if ask.features), None)
    if pictured is None:
        pytest.skip("a family without rows")
    engine = new_engine(case)
    waiting = submit(engine, pictured, rows=False)
    text = submit(engine, case.asks[1])
    step_until(engine, lambda: any(isinstance(e, Finished) for e in sent(engine, text)))
    assert all(isinstance(e, Accepted) for e in sent(engine, waiting))
    write_rows(engine, waiting, pictured)
    step_until(engine, lambda: any(isinstance(e, Finished) for e in sent(engine, waiting)))
    assert [e.choice.token for e in sent(engine, waiting) if isinstance(e, Token)] == pictured.answer.tokens
