"""Divides the memory granted to the KV cache among layer groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.llm.attention.layers import KvLayer
from services.llm.config import Pruning
from services.llm.layer_groups import Kind, LayerGroup
from services.models.registry import UnsupportedModel


@dataclass(frozen=True)
class Demand:
    """What the engine may hold at once, in tokens and sequences; ``media_rows`` are those of one cross-attention item."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    media_rows: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


def assign_groups(layers: Sequence[KvLayer], pruning: Pruning | None) -> tuple[list[tuple[Kind, int | None]], dict[int, int]]:
    """The groups, as (kind, window), and each layer's group by index; the group that keeps most of a sequence is first."""
    order = {Kind.FULL: 0, Kind.PRUNED: 1, Kind.SLIDING: 2, Kind.CROSS: 3}

    def key(layer: KvLayer) -> tuple[Kind, int | None]:
        kind = Kind.PRUNED if pruning and layer.kind is Kind.FULL and layer.index >= pruning.layer else layer.kind
        return kind, layer.window

    kinds = sorted({key(layer) for layer in layers}, key=lambda k: (order[k[0]], k[1] or 0))
    return kinds, {layer.index: kinds.index(key(layer)) for layer in layers}


def size_groups(
    kinds: Sequence[tuple[Kind, int | None]],
    group_of: dict[int, int],
    layers: Sequence[KvLayer],
    demand: Demand,
    budget: int,
    itemsize: int,
    pruning: Pruning | None = None,
) -> list[LayerGroup]:
    """As many blocks as ``budget`` bytes hold, and no more than ``max_num_seqs`` full contexts need.

    The first group gets the most; a sliding window's group gets what its windows can hold at most, so that it never runs
    out before the first does.

    Raises:
        UnsupportedModel: not even one block of each group fits.
    """
    block_bytes = [
        demand.block_size * sum(layer.token_bytes(itemsize) for layer in layers if group_of[layer.index] == g)
        for g in range(len(kinds))
    ]

    def counts(first: int) -> list[int]:
        return [_blocks(kind, window, first, demand, pruning) if g else first for g, (kind, window) in enumerate(kinds)]

    def total(first: int) -> int:
        return sum(n * size for n, size in zip(counts(first), block_bytes, strict=True))

    low, high = 0, demand.max_num_seqs * demand.blocks(demand.max_model_len)
    while low < high:  # the largest that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle - 1)
    if low < 1:
        raise UnsupportedModel(f"the KV pool may take {budget} bytes but one block needs {total(1)}; grant it more memory")
    return [LayerGroup(kind, blocks, window) for (kind, window), blocks in zip(kinds, counts(low), strict=True)]


def _blocks(kind: Kind, window: int | None, first: int, demand: Demand, pruning: Pruning | None) -> int:
    """Blocks of a further group, given those of the first."""
    if kind is Kind.SLIDING:
        assert window is not None
        most = demand.max_num_seqs * (demand.blocks(window) + 2) + demand.blocks(demand.max_num_batched_tokens)
        return min(first, most)
    if kind is Kind.PRUNED:
        assert pruning is not None
        usual = -(-int(first * (1 + pruning.keep)) // 2)  # about half of a prompt with pictures is visual
        return min(first, max(usual, demand.blocks(demand.max_model_len)))  # one of plain text must fit too
    return max(demand.blocks(demand.media_rows), min(first, demand.max_num_seqs * demand.blocks(demand.media_rows)))
