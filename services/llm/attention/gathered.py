"""Fast attention with torch's own operators: gathers blocks into shared buffers, all decoding sequences in one call.

Runs on a CPU and, for families whose masks no paged kernel takes, on CUDA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import Backend, GroupPlan, Rows
from services.llm.attention.pool import KvPool


class GatheredBackend(Backend):
    """SDPA over gathered keys and values."""

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
        if group.decodes:
            self.decode(pool, layer, group, query[:, : group.decodes], out[: group.decodes], scaling, softcap)
        for rows in group.rows:
            span = slice(rows.start, rows.start + rows.count)
            out[span] = _chunk(pool, layer, group.window, rows, query[:, span], key[:, span], value[:, span], scaling, softcap)
        return out

    def decode(
        self,
        pool: KvPool,
        layer: KvLayer,
        group: GroupPlan,
        query: torch.Tensor,
        out: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """One token each of ``decodes`` sequences: query ``[heads, decodes, head_dim]`` into ``out``."""
        keys, values = pool.gather(layer.source, group.decode_blocks)
        batch, kv_heads, length, head_dim = keys.shape
        # heads that share keys stand together, so they fold into the query axis
        folded = query.transpose(0, 1).reshape(batch, kv_heads, -1, head_dim)
        out.copy_(_sdpa(folded, keys, values, group.decode_mask(length), scaling, softcap).reshape(out.shape))


def _chunk(
    pool: KvPool,
    layer: KvLayer,
    window: int | None,
    rows: Rows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """A chunk of one sequence: query ``[heads, count, head_dim]`` to ``[count, heads, value_dim]``."""
    first = rows.first_key(window, pool.block_size)
    if rows.context == 0 and rows.media_mask is None:
        keys, values = key[None], value[None]  # all its keys are this step's own
    else:
        blocks = rows.blocks[None, first // pool.block_size :]
        keys, values = pool.gather(layer.source, blocks)
        keys, values = keys[:, :, : rows.length - first], values[:, :, : rows.length - first]
    visible = rows.visible(window, layer.layer_type, first)
    return _sdpa(query[None], keys, values, visible, scaling, softcap)[0].transpose(0, 1)


def _sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """``[batch, heads, tokens, head_dim]`` to ``[batch, heads, tokens, value_dim]``; ``visible`` None is causal."""
    grouped = query.shape[1] != keys.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, is_causal=visible is None, scale=scaling, enable_gqa=grouped
        )
    if grouped:
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.tanh(query @ keys.transpose(2, 3) * (scaling / softcap)) * softcap
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1, dtype=torch.float32).to(values.dtype) @ values
