"""Attention of a packed step over the paged KV pool, registered with transformers under one name for every family.

A step packs the tokens of many sequences into ``[1, tokens, hidden]``. For each layer, transformers hands us queries,
keys and values of those tokens; keys and values are written to the pool, and each sequence attends over its own blocks.
Decoding sequences are gathered into one shared buffer and attend in one batched call; prefill chunks attend one by one.
The step's plan travels in a context variable, which works for every family's call signature.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.models.hf import transformers

NAME = "triptych_paged"
current_plan: contextvars.ContextVar[StepPlan] = contextvars.ContextVar("current_plan")


class KvPool:
    """Keys and values of every layer: ``[layers][num_blocks + 1, block_size, kv_heads, head_dim]``.

    The last block belongs to nobody and stays zero: block tables of unequal length are padded with it. The two gather
    buffers are shared by all layers: a fresh buffer per layer costs more than the attention itself.
    """

    def __init__(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (num_blocks + 1, block_size, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.block_size = block_size
        self.padding_block = num_blocks
        self._buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values ``[tokens, kv_heads, head_dim]`` at ``slots`` ``[tokens]`` (block * block_size + position)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def clear(self, blocks: list[int]) -> None:
        """Fill blocks with zeros in every layer."""
        for pool in self.keys + self.values:
            pool[blocks] = 0

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks ``[batch, n]`` as keys and values ``[batch, kv_heads, n * block_size, head_dim]``, valid until the next call."""
        return self._gather(0, self.keys[layer], blocks), self._gather(1, self.values[layer], blocks)

    def _gather(self, which: int, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        batch, count = blocks.shape
        width = pool[0].numel()
        if self._buffers[which].numel() < batch * count * width:
            self._buffers[which] = pool.new_empty(batch * count * width)
        out = self._buffers[which][: batch * count * width].view(batch * count, width)
        torch.index_select(pool.flatten(1), 0, blocks.flatten(), out=out)
        return out.view(batch, count * self.block_size, *pool.shape[2:]).transpose(1, 2)


@dataclass(frozen=True)
class PrefillRows:
    """Rows ``[start, start + count)`` of the step: tokens of one sequence behind ``context`` computed ones."""

    start: int
    count: int
    context: int
    blocks: torch.Tensor  # [1, n]


@dataclass(frozen=True)
class StepPlan:
    """Where a step's tokens stand in the pool.

    Rows ``[0, decodes)`` of the step are decoding sequences, one token each; prefill chunks follow.
    """

    pool: KvPool
    slots: torch.Tensor  # [tokens]
    decodes: int
    decode_blocks: torch.Tensor  # [decodes, most blocks], padded with the pool's padding block
    decode_lengths: torch.Tensor  # [decodes], the new token included
    prefills: Sequence[PrefillRows]


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim], after RoPE
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention ``[1, tokens, heads, head_dim]``; the signature is that of transformers' attention functions."""
    plan = current_plan.get()
    layer = module.layer_idx
    plan.pool.write(layer, plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = torch.empty_like(query[0].transpose(0, 1).contiguous())  # [tokens, heads, head_dim]
    if plan.decodes:
        out[: plan.decodes] = _decode(plan, layer, query[0, :, : plan.decodes], scaling, sliding_window)
    for rows in plan.prefills:
        queries = query[:, :, rows.start : rows.start + rows.count]
        out[rows.start : rows.start + rows.count] = _prefill(plan.pool, layer, rows, queries, scaling, sliding_window)
    return out.unsqueeze(0), None


def _decode(plan: StepPlan, layer: int, query: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    """One token each of ``decodes`` sequences: query ``[heads, decodes, head_dim]`` to ``[decodes, heads, head_dim]``."""
    keys, values = plan.pool.gather(layer, plan.decode_blocks)
    batch, kv_heads, length, head_dim = keys.shape
    positions = torch.arange(length, device=query.device)
    visible = positions < plan.decode_lengths[:, None]
    if window is not None:
        visible &= positions >= plan.decode_lengths[:, None] - window
    # heads that share keys stand together, so they fold into the query axis
    folded = query.transpose(0, 1).reshape(batch, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=visible[:, None, None], scale=scaling)
    return out.reshape(batch, -1, head_dim)


def _prefill(
    pool: KvPool, layer: int, rows: PrefillRows, query: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """A chunk of one sequence: query ``[1, heads, count, head_dim]`` to ``[count, heads, head_dim]``."""
    keys, values = pool.gather(layer, rows.blocks)
    length = rows.context + rows.count
    keys, values = keys[:, :, :length], values[:, :, :length]
    mask = None
    if rows.context or (window is not None and length > window):
        at = torch.arange(rows.context, length, device=query.device)[:, None]
        positions = torch.arange(length, device=query.device)
        mask = positions <= at
        if window is not None:
            mask &= positions > at - window
    grouped = query.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


transformers.AttentionInterface.register(NAME, paged_attention)
