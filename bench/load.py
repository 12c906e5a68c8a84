"""Requests as a JSON file that every engine reads: the mixed load of uneven texts, or what a comparison asks."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ask:
    """A prompt, and how many tokens to generate, whatever they are.

    Attributes:
        prompt: token ids; of a picture one placeholder.
        new_tokens: how many.
        image: a picture's file, or nothing.
        text: the prompt before it became tokens.
    """

    prompt: list[int]
    new_tokens: int
    image: str = ""
    text: str = ""


def make_load(count: int, vocab: int, seed: int) -> list[Ask]:
    """Prompts of 16 to 200 tokens, answers of 8 to 96."""
    rng = random.Random(seed)
    return [Ask([rng.randrange(2, vocab) for _ in range(rng.randint(16, 200))], rng.randint(8, 96)) for _ in range(count)]


def write_load(path: Path, asks: list[Ask]) -> None:
    """Write requests for :func:`read_load`."""
    path.write_text(json.dumps([asdict(ask) for ask in asks]))


def read_load(path: Path) -> list[Ask]:
    """Read what :func:`write_load` wrote."""
    return [Ask(**ask) for ask in json.loads(path.read_text())]
