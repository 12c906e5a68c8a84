"""The oracle itself: its items fill the prompt's placeholders, and media and questions make a difference to its answers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.models.media import Grid, Modality
from tests.oracle import catalogue
from tests.oracle.prompt import positions
from tests.reference import NEW_TOKENS, RATE, Ask, Clip, Oracle, Part, Sound, asks_for, clip, picture, sound

LISTENING = ("qwen2_audio", "voxtral", "qwen2_5_omni_thinker")
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")
TEXT = ("qwen2", "qwen3", "llama", "mistral", "phi3", "llama_dynamic")
MEDIA = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *LISTENING)


@pytest.fixture(scope="module", params=[*MEDIA, *TEXT])
def asked(request: pytest.FixtureRequest, checkpoint_dir: Callable[[str], Path]) -> tuple[Oracle, list[Ask]]:
    return Oracle(checkpoint_dir(request.param)), asks_for(request.param, 1, 6)


def kind(part: Part) -> Modality | None:
    kinds = {str: None, bytes: Modality.IMAGE, Sound: Modality.AUDIO, Clip: Modality.VIDEO}
    return kinds[type(part)]


def same(part: Part) -> object:
    """Equal for equal parts."""
    return (part.frames.shape, part.frames.tobytes(), part.fps) if isinstance(part, Clip) else part


def media(ask: Ask) -> list[Modality]:
    return [modality for _, parts in ask.turns for part in parts if (modality := kind(part)) is not None]


def test_items_fill_the_placeholders(asked: tuple[Oracle, list[Ask]]) -> None:
    oracle, asks = asked
    for ask in asks:
        inputs = oracle.inputs(ask)
        items = oracle.items(inputs)
        assert [item.modality for item in items] == media(ask)
        rows = Counter[Modality]()
        for item in items:
            rows[item.modality] += len(item.rows)
            assert all(level.shape == item.rows.shape for level in item.deepstack)
        assert all(rows[modality] == len(positions(oracle.model, inputs, modality)) for modality in Modality)


def test_every_step_has_logits(asked: tuple[Oracle, list[Ask]]) -> None:
    oracle, asks = asked
    for ask in asks:
        answer = oracle.answer(ask)
        assert len(answer.tokens) == NEW_TOKENS == len(answer.logits)
        assert answer.logits.argmax(-1).tolist() == answer.tokens
        assert torch.equal(answer.first_logits, answer.logits[0])
        assert len(set(answer.tokens)) >= 4


@pytest.mark.parametrize("family", MEDIA)
def test_asks_mix_media_and_turns(family: str) -> None:
    asks = asks_for(family, 3, 5)
    counts = [len(media(ask)) for ask in asks]
    assert {0, 1, 3} <= set(counts)
    assert any(len(ask.turns) > 1 for ask in asks)
    assert {modality for ask in asks for modality in media(ask)} == set(catalogue("TAKES")[family].modalities)
    again = asks_for(family, 3, 5)
    assert [[same(part) for _, parts in ask.turns for part in parts] for ask in asks] == [
        [same(part) for _, parts in ask.turns for part in parts] for ask in again
    ]


@pytest.mark.parametrize("family", TEXT)
def test_text_families_are_asked_text(family: str) -> None:
    asks = asks_for(family, 3, 5)
    assert not any(media(ask) for ask in asks)
    assert any(len(ask.turns) > 1 for ask in asks)


CASES = [(family, Modality.IMAGE) for family in SEEING] + [(family, Modality.VIDEO) for family in SEEING]
CASES += [(family, Modality.AUDIO) for family in LISTENING]


@pytest.mark.parametrize(("family", "modality"), CASES)
def test_other_media_other_answers(family: str, modality: Modality, checkpoint_dir: Callable[[str], Path]) -> None:
    oracle, rng = Oracle(checkpoint_dir(family)), random.Random(5)
    made: list[Part] = [
        picture(rng, 112, 112, "PNG")
        if modality is Modality.IMAGE
        else sound(rng, 2.0)
        if modality is Modality.AUDIO
        else clip(rng, 112, 112, 4, 2.0)
        for _ in range(5)
    ]
    answers = [oracle.answer(Ask([("user", ["what is this", part])])) for part in made]
    assert all(answer.prompt == answers[0].prompt for answer in answers)
    for one, other in itertools.combinations(answers, 2):
        assert (one.first_logits - other.first_logits).abs().max() > 0.1
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_voxtral_regroups_windows_by_recording(checkpoint_dir: Callable[[str], Path]) -> None:
    oracle, rng = Oracle(checkpoint_dir("voxtral")), random.Random(6)
    long, short = sound(rng, 40), sound(rng, 0.3)
    both = oracle.items(oracle.inputs(Ask([("user", [long, short, "which"])])))
    alone = [oracle.items(oracle.inputs(Ask([("user", [part])])))[0] for part in (long, short)]
    assert [item.grid for item in both] == [Grid(1, 1, 750), Grid(1, 1, 375)]
    assert all((one.rows - other.rows).abs().max() < 1e-4 for one, other in zip(both, alone, strict=True))


def test_omni_items_carry_what_positions_need(checkpoint_dir: Callable[[str], Path]) -> None:
    oracle, rng = Oracle(checkpoint_dir("qwen2_5_omni_thinker")), random.Random(7)
    heard, seen = sound(rng, 1.5), clip(rng, 84, 112, 4, 2.0)
    items = oracle.items(oracle.inputs(Ask([("user", [seen, "and", heard])])))
    assert [item.details for item in items] == [{"second_per_grid": 1.0}, {"feature_length": 150}]


def test_clips_of_other_rates_have_other_positions(checkpoint_dir: Callable[[str], Path]) -> None:
    oracle, seen = Oracle(checkpoint_dir("qwen2_5_vl")), clip(random.Random(8), 84, 84, 4, 2.0)
    slow, fast = (oracle.answer(Ask([("user", [Clip(seen.frames, fps), "what"])])) for fps in (0.5, 2.0))
    details = [oracle.items(answer.inputs)[0].details["second_per_grid"] for answer in (slow, fast)]
    assert details == [4.0, 1.0]
    assert (slow.first_logits - fast.first_logits).abs().max() > 1e-3


def test_an_answer_does_not_depend_on_the_one_before(checkpoint_dir: Callable[[str], Path]) -> None:
    oracle, asks = Oracle(checkpoint_dir("llama_dynamic")), asks_for("llama_dynamic", 2, 8)
    forward = [oracle.answer(ask) for ask in asks]
    backward = [oracle.answer(ask) for ask in reversed(asks)][::-1]
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(forward, backward, strict=True))


def test_recordings_are_plain_wav() -> None:
    made = sound(random.Random(9), 0.5)
    assert len(made.samples) == RATE // 2
    assert made.wav[:4] == b"RIFF"
    assert 0.05 < abs(made.samples).max() <= 1
