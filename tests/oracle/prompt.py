"""Where a prompt's placeholders are, and in which order its items come."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from services.models.media import Modality
from tests.oracle import Item


def placeholder(model: Any, modality: Modality) -> int | None:
    """The id that stands for one row of this kind of medium; None: the family takes no such medium."""
    token: int | None = getattr(model.config, f"{modality.word}_token_id", None)
    return token


def positions(model: Any, inputs: Any, modality: Modality) -> list[int]:
    """Indices of the placeholders of one kind in the prompt of a request."""
    token = placeholder(model, modality)
    return [] if token is None else (inputs["input_ids"][0] == token).nonzero().flatten().tolist()


def runs(model: Any, inputs: Any, modality: Modality) -> list[int]:
    """Lengths of the unbroken stretches of placeholders of one kind."""
    steps = enumerate(positions(model, inputs, modality))
    return [len(list(run)) for _, run in groupby(steps, key=lambda step: step[1] - step[0])]


def in_order(model: Any, inputs: Any, items: list[Item]) -> list[Item]:
    """Items of all kinds, each kind already in its own order, by where their first placeholder is."""
    found = []
    for modality in Modality:
        places = positions(model, inputs, modality)
        at = 0
        for item in items:
            if item.modality is modality:
                found.append((places[at], item))
                at += len(item.rows)
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]
