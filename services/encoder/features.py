"""From preprocessed items to pieces and to features: what is of one kind and shape shares a call to the towers.

Knows nothing of families, which say in a :class:`Scheme` what differs between them, nor of threads, refs or messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.models.media import Grid, ItemPlan

Inputs = Mapping[str, torch.Tensor]  # of one item, by the names that the towers take; may be joined along their first extent
Features = list[torch.Tensor]  # each [rows, hidden]; the first is merged into the prompt, later ones are deepstack
Levels = list[Sequence[torch.Tensor]]  # for each feature, its entries in order; an entry is [rows, hidden]


def flat(inputs: Inputs, plan: ItemPlan, config: Mapping[str, Any]) -> Grid:
    """The grid of rows that have no shape: one line of as many as were planned."""
    return Grid(1, 1, plan.rows)


def one(inputs: Inputs) -> int:
    """An item is one entry."""
    return 1


@dataclass(frozen=True)
class Cut:
    """How an item comes apart into units that the towers see each by itself: tiles, steps of time, windows.

    Attributes:
        units: (inputs, the model's configuration) to how many there are, at least one.
        take: (inputs, configuration, start, stop) to the inputs of units ``[start, stop)``; views, not copies. Rows of
            consecutive takes are those of the whole, one behind the other.
    """

    units: Callable[[Inputs, Any], int]
    take: Callable[[Inputs, Any, int, int], Inputs]


def _count(inputs: Inputs, config: Any) -> int:
    return len(next(iter(inputs.values())))


def _slice(inputs: Inputs, config: Any, start: int, stop: int) -> Inputs:
    return {name: tensor[start:stop] for name, tensor in inputs.items()}


FIRST_EXTENT = Cut(_count, _slice)  # units are the first extent of every input


@dataclass(frozen=True)
class Scheme:
    """How a family encodes one modality.

    Attributes:
        prepare: (transformers' processor, decoded medium, plan) to the item's inputs.
        call: (base model, joined inputs of several items) to their features.
        grid: (inputs, plan, config.json) to how the rows will be arranged.
        entries: how many entries of ``call``'s answer are the item's.
        cut: how the item comes apart; None where it is one sequence to the towers.
    """

    prepare: Callable[[Any, Any, ItemPlan], Inputs]
    call: Callable[[Any, Inputs], Levels]
    grid: Callable[[Inputs, ItemPlan, Mapping[str, Any]], Grid] = flat
    entries: Callable[[Inputs], int] = one
    cut: Cut | None = None


def cut_item(scheme: Scheme, inputs: Inputs, config: Any, patches: int, size: int) -> list[tuple[Inputs, int]]:
    """The pieces of an item of so many patches, in the order of its rows, and the patches of each.

    A piece has as many units as ``size`` patches hold, and at least one; units are spread evenly over pieces.
    """
    units = 1 if scheme.cut is None else scheme.cut.units(inputs, config)
    count = min(units, -(-units // max(1, size * units // patches)))
    if scheme.cut is None or count == 1:
        return [(inputs, patches)]
    bounds = [units * i // count for i in range(count + 1)]
    return [
        (scheme.cut.take(inputs, config, start, stop), patches * stop // units - patches * start // units)
        for start, stop in itertools.pairwise(bounds)
    ]


def encode_items(scheme: Scheme, base: Any, items: Sequence[Inputs], dtype: torch.dtype, device: torch.device) -> list[Features]:
    """The features of each item, on ``device``. Items that differ only in their first extent go through the towers together."""
    groups: dict[object, list[int]] = {}
    for index, inputs in enumerate(items):
        groups.setdefault(tuple((name, tensor.shape[1:]) for name, tensor in inputs.items()), []).append(index)
    features: dict[int, Features] = {}
    for indices in groups.values():
        group = [items[index] for index in indices]
        joined = {name: torch.cat([inputs[name] for inputs in group]).to(device) for name in group[0]}
        joined = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in joined.items()}
        split = [_split(level, [scheme.entries(inputs) for inputs in group]) for level in scheme.call(base, joined)]
        features |= zip(indices, ([*item] for item in zip(*split, strict=True)), strict=True)
    return [features[index] for index in range(len(items))]


def _split(entries: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Each item's rows out of the entries of all."""
    assert len(entries) == sum(counts), f"{len(entries)} entries for items of {counts}"
    rest = iter(entries)
    return [torch.cat([next(rest) for _ in range(count)]) for count in counts]
