"""Attention written to be read: sequence by sequence, fresh copies, the softmax spelled out. What the fast one must equal."""

from __future__ import annotations

import torch

from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import Backend, GroupPlan
from services.llm.attention.pool import KvPool


class NaiveBackend(Backend):
    """Works on any device, for every family."""

    def attend(
        self,
        pool: KvPool,
        layer: KvLayer,
        group: GroupPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        out = query.new_zeros(query.shape[1], query.shape[0], layer.value_dim)
        for i in range(group.decodes):
            first, end = int(group.decode_first[i]), int(group.decode_end[i])
            keys, values = _read(pool, layer, group.decode_blocks[i], first, end)
            out[i] = _softmax_attention(query[:, i : i + 1], keys, values, None, scaling, softcap)[0]
        for rows in group.rows:
            first = rows.first_key(group.window, pool.block_size)
            keys, values = _read(pool, layer, rows.blocks, first, rows.length)
            visible = rows.visible(group.window, layer.layer_type, first)
            if visible is None:
                visible = torch.ones(rows.count, rows.count, dtype=torch.bool, device=query.device).tril()
            span = slice(rows.start, rows.start + rows.count)
            out[span] = _softmax_attention(query[:, span], keys, values, visible, scaling, softcap)
        return out


def _read(pool: KvPool, layer: KvLayer, blocks: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens ``[first, end)``, ``[kv_heads, tokens, head_dim]``."""
    at = torch.arange(first, end, device=blocks.device)
    slots = blocks[at // pool.block_size] * pool.block_size + at % pool.block_size
    keys, values = pool.keys[layer.source].flatten(0, 1)[slots], pool.values[layer.source].flatten(0, 1)[slots]
    return keys.transpose(0, 1), values.transpose(0, 1)


def _softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """``[heads, tokens, head_dim]`` to ``[tokens, heads, value_dim]``; heads that share keys stand together."""
    group = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * scaling  # [heads, tokens, keys]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return (weights.to(values.dtype) @ values.repeat_interleave(group, 0)).transpose(0, 1)
