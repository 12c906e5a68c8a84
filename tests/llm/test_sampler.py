"""Choosing tokens: each step against transformers' own processors, rows against batches, frequencies against probabilities."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.llm import sampler
from services.llm.logprobs import Choice, prompt_logprobs
from services.llm.occurrences import Occurrences
from services.llm.sampler import Sampling, TokenChooser, choose

VOCAB = 3000


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def chooser(prompt: tuple[int, ...] = (1, 2), ends: tuple[int, ...] = (), min_tokens: int = 0, **sampling: Any) -> TokenChooser:
    return TokenChooser(Sampling(**sampling), prompt, ends, min_tokens)


def one(chooser: TokenChooser, logits: torch.Tensor) -> Choice:
    [choice] = choose([chooser], logits[None])
    assert choice is not None
    return choice


def answer(chooser: TokenChooser, steps: int, seed: int = 0, beside: int = 0) -> list[int]:
    """Tokens over ``steps`` rows of random logits, alone or in the middle of others."""
    rows, tokens = random_logits(steps, seed=seed), []
    others = random_logits(steps * 2 * beside, seed=99).view(steps, 2 * beside, VOCAB)
    kinds: Any = [
        {"temperature": 1.0, "top_p": 0.5},
        {"presence_penalty": 1.0},
        {"logprobs": 3},
        {"temperature": 0.1, "top_k": 7},
    ]
    crowd = [TokenChooser(Sampling(seed=i, **kinds[i % len(kinds)]), [5], ()) for i in range(2 * beside)]
    for row, more in zip(rows, others, strict=True):
        batch = torch.cat([more[:beside], row[None], more[beside:]])
        choosers = [*crowd[:beside], chooser, *crowd[beside:]]
        for each, choice in zip(choosers, choose(choosers, batch), strict=True):
            assert choice is not None
            each.accept(choice.token)
            if each is chooser:
                tokens.append(choice.token)
    return tokens


EVERY_STEP = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": VOCAB + 5},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", EVERY_STEP, ids=str)
def test_probabilities_are_those_of_transformers(sampling: dict[str, float]) -> None:
    prompt = tuple(range(0, VOCAB, 7))
    logits = random_logits(4, seed=3)
    processors = LogitsProcessorList()
    if (penalty := sampling.get("repetition_penalty", 1.0)) != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(float(sampling.get("temperature", 1.0))))
    if min_p := sampling.get("min_p"):
        processors.append(MinPLogitsWarper(min_p))
    if top_k := sampling.get("top_k"):
        processors.append(TopKLogitsWarper(int(top_k)))
    if top_p := sampling.get("top_p"):
        processors.append(TopPLogitsWarper(top_p))
    wanted = torch.softmax(processors(torch.tensor([prompt] * 4), logits.clone()), dim=-1)
    choosers = [chooser(prompt=prompt, **{"temperature": 1.0, **sampling}) for _ in range(4)]
    work = logits.clone()
    sampler._edit(work, choosers, [None] * 4)
    weights = sampler._weights(work, [c.sampling for c in choosers])
    found = weights / weights.sum(-1, keepdim=True)
    assert (found[wanted > 1e-12] > 0).all() and (found[wanted == 0] < 1e-12).all()
    torch.testing.assert_close(found.float(), wanted, atol=1e-6, rtol=1e-5)


def test_equal_logits_at_the_edges_of_the_filters() -> None:
    level = torch.zeros(1, 10)
    [kept] = sampler._weights(level, [Sampling(temperature=1, top_p=0.5)])
    assert kept.count_nonzero() == 5 and kept[:5].all()  # the fewest that add up to a half
    [kept] = sampler._weights(level, [Sampling(temperature=1, top_k=3)])
    assert kept.count_nonzero() == 10  # as in transformers: all as likely as the third
    wide = torch.zeros(1, VOCAB)  # more than are sorted at first
    [kept] = sampler._weights(wide, [Sampling(temperature=1, top_p=0.75)])
    assert kept.count_nonzero() == VOCAB * 3 // 4


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"repetition_penalty": 2.0}], ids=str
)
def test_frequencies_match_the_probabilities(sampling: dict[str, float]) -> None:
    settings = Sampling(seed=20, **{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    logits = random_logits(1, vocab=8, seed=1, scale=1.0)
    work = logits.clone()
    sampler._edit(work, [TokenChooser(settings, [3], ())], [None])
    weights = sampler._weights(work, [settings])[0].double()
    draws = 20_000
    choosers = [TokenChooser(replace(settings, seed=seed), [3], ()) for seed in range(draws)]
    by_seed = Counter(c.token for c in choose(choosers, logits.expand(draws, -1)) if c)
    drawer, by_place = TokenChooser(replace(settings, repetition_penalty=1.0), [3], ()), Counter[int]()
    for _ in range(draws // 10):
        token = one(drawer, work[0]).token
        drawer.accept(token)
        by_place[token] += 1
    likely = weights > 0
    for seen in (by_seed, by_place):
        counts = torch.tensor([seen[token] for token in range(8)]).double()
        assert not counts[~likely].any()
        expected = weights[likely] / weights.sum() * counts.sum()
        assert chisquare(counts[likely], expected).pvalue > 0.001


SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 9.0, 8: -3.0}, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 6, "logprobs": 2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(sampling: dict[str, Any]) -> None:
    alone = answer(chooser(**sampling), 30)
    assert answer(chooser(**sampling), 30) == alone
    for beside in (1, 2, 9):
        assert answer(chooser(**sampling), 30, beside=beside) == alone


@pytest.mark.parametrize("vocab", [VOCAB, 1023, 49_157])
def test_weights_of_a_row_are_bit_for_bit_those_of_the_row_alone(vocab: int) -> None:
    logits = random_logits(7, vocab=vocab, seed=8)
    settings = [Sampling(0.3 + i / 5, top_p=[1, 0.95][i % 2], top_k=[0, 0, 50][i % 3], min_p=0.001 * i) for i in range(7)]
    together = sampler._weights(logits, settings)
    for row, setting, whole in zip(logits, settings, together, strict=True):
        assert torch.equal(sampler._weights(row[None].clone(), [setting])[0], whole)


def test_greedy_rows_beside_others_and_ties() -> None:
    logits = random_logits(6)
    logits[2, [40, 41]] = 50.0
    choosers = [chooser(), chooser(temperature=1.0), chooser(), chooser(logprobs=1), chooser(presence_penalty=1.0), chooser()]
    choices = choose(choosers, logits)
    best = logits.argmax(-1).tolist()
    assert [c.token for i, c in enumerate(choices) if c and i != 1] == best[:1] + best[2:]
    assert choices[2] == Choice(40)
    assert choose(choosers, logits) == choices  # nothing moved on


def test_seeds_make_answers_and_the_same_seed_the_same() -> None:
    answers = [tuple(answer(chooser(temperature=2.0, seed=seed), 12)) for seed in (0, 1, 2, 2**63, 2**64 - 1, 1)]
    assert len(set(answers)) == 5 and answers[1] == answers[5]


def test_forks_have_streams_of_their_own() -> None:
    parent = chooser(temperature=2.0, seed=9, presence_penalty=0.5)
    forks = [parent, *(parent.fork(i) for i in range(1, 4))]
    answers = [tuple(answer(fork, 12)) for fork in forks]
    assert len(set(answers)) == 4
    assert answers[2] == tuple(answer(chooser(temperature=2.0, seed=11, presence_penalty=0.5), 12))


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too() -> None:
    logits = torch.zeros(10)
    for token in range(10):
        logits[token] = 5.0 - token  # 5 .. -4
    writer = chooser(prompt=(0, 9), presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    for token in (1, 1, 1, 6):
        writer.accept(token)
    work = logits[None].clone()
    sampler._edit(work, [writer], [None])
    wanted = logits.clone()
    wanted[0], wanted[9] = 2.5, -8.0  # of the prompt: divided where positive, multiplied where negative
    wanted[1] = 4.0 / 2 - 0.5 - 3 * 0.25
    wanted[6] = -1.0 * 2 - 0.5 - 0.25
    assert torch.equal(work[0], wanted)
    only_answer = chooser(prompt=(0, 9), presence_penalty=1.0)
    assert one(only_answer, logits).token == 0
    only_answer.accept(0)
    only_answer.accept(0)
    assert one(only_answer, logits - 0.5).token == 0  # 3.5 before 3.5: a presence penalty does not grow
    assert one(chooser(logit_bias={4: 10.0}), logits).token == 4
    assert one(chooser(logit_bias={0: -100.0}), logits).token == 1


def test_occurrences_are_those_counted_at_once() -> None:
    source = random.Random(3)
    prompt, output = [source.randrange(50) for _ in range(30)], [source.randrange(80) for _ in range(400)]
    seen = Occurrences(prompt)
    for token in output[:200]:
        seen.add(token)
    fork = seen.copy()
    for token in output[200:]:
        fork.add(token)
    for occurrences, part in ((seen, output[:200]), (fork, output)):
        counts = Counter(part)
        assert dict(zip(occurrences.tokens.tolist(), occurrences.counts.tolist(), strict=True)) == {
            token: counts[token] for token in {*prompt, *part}
        }


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([1.0, 9.0, 8.0, 2.0])
    ending = chooser(ends=(1, 2), min_tokens=2)
    for _ in range(2):
        assert one(ending, logits).token == 3
        ending.accept(3)
    assert one(ending, logits).token == 1 and ending.plain
    assert one(chooser(ends=(), min_tokens=5), logits).token == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4])
def test_however_cold_the_likeliest_token_is_chosen(temperature: float) -> None:
    logits = random_logits(1)[0]
    for filters in ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        assert one(chooser(temperature=temperature, **filters), logits).token == int(logits.argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"repetition_penalty": 2.0, "logprobs": 1}], ids=str)
def test_a_row_that_is_not_numbers_fails_alone(bad: float, sampling: dict[str, Any]) -> None:
    logits = random_logits(3)
    wanted = choose([chooser(**sampling) for _ in range(3)], logits)
    logits[1, 17] = bad
    choosers = [chooser(**sampling) for _ in range(3)]
    choices = choose(choosers, logits)
    assert [choices[0], choices[2]] == [wanted[0], wanted[2]] and choices[1] is None
    assert [c.failure and str(c.failure) for c in choosers] == [None, sampler.NOT_NUMBERS, None]


def test_logits_of_impossible_tokens_are_numbers() -> None:
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 3] = 0
    assert choose([chooser(), chooser(temperature=1.0)], logits) == [Choice(3), Choice(3)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 1}], ids=str)
def test_a_row_without_a_token_left_fails_alone(sampling: dict[str, Any]) -> None:
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 3] = 0
    choosers = [chooser(**sampling), chooser(ends=(3,), min_tokens=1, **sampling)]
    choices = choose(choosers, logits)
    assert choices[0] is not None and choices[0].token == 3 and choices[1] is None and choosers[1].failure


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    wanted = torch.log_softmax(logits, dim=-1)
    choosers = [
        chooser(logprobs=0, logit_bias={5: 100.0}),
        chooser(logprobs=4, temperature=3.0, seed=1),
        chooser(logprobs=20, presence_penalty=2.0),
    ]
    for row, top, choice in zip(wanted, (0, 4, 20), choose(choosers, logits), strict=True):
        assert choice is not None and choice.rank is not None
        assert choice.logprob == pytest.approx(float(row[choice.token]), abs=1e-5)
        assert choice.rank == int((row > row[choice.token]).sum()) + 1
        values, ids = row.topk(top)
        assert [token for token, _ in choice.top] == ids.tolist()
        assert [p for _, p in choice.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert choose(choosers, logits)[0].token == 5  # type: ignore[union-attr]


def test_logprobs_of_a_prompt() -> None:
    logits, tokens = random_logits(150, vocab=40), [i % 40 for i in range(150)]
    wanted = torch.log_softmax(logits, dim=-1)
    found = prompt_logprobs(logits, tokens, 3)
    assert [c.token for c in found] == tokens
    assert [c.logprob for c in found] == pytest.approx(wanted[range(150), tokens].tolist(), abs=1e-5)
    assert [[t for t, _ in c.top] for c in found] == wanted.topk(3).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 3) == []
    assert [c.top for c in prompt_logprobs(logits[:1], [0], 0)] == [()]


def test_the_callers_logits_are_left_alone() -> None:
    logits = random_logits(4)
    before = logits.clone()
    kinds: Any = [{}, {"temperature": 1.0, "top_p": 0.5}, {"logit_bias": {1: 5.0}}, {"repetition_penalty": 2.0}]
    choose([chooser(**kind) for kind in kinds], logits)
    assert torch.equal(logits, before)
