"""Attention on a CPU by our own kernel, which reads the blocks where they are."""

from __future__ import annotations

import torch

from services.llm.attention.gathered import GatheredBackend
from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import GroupPlan
from services.llm.attention.pool import KvPool
from services.llm.layer_groups import Kind
from services.llm.native.paged_kernel import PagedBatch, PagedKernel

_LONG = 64  # rows of a chunk from which on torch's products in 16 bits win


class NativeBackend(GatheredBackend):
    """The kernel for causal layers; masks of a prompt's own, cross-attention and long chunks in 16 bits go the gathered way."""

    def __init__(self, kernel: PagedKernel) -> None:
        self._kernel = kernel

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
        if not self.stores(layer, group, query.dtype):
            return super().attend(pool, layer, group, query, key, value, scaling, softcap)
        if group.kernel_batch is None:
            ragged = group.ragged(pool.block_size, pool.keys[layer.source].shape[0] - 1)
            group.kernel_batch = PagedBatch(ragged.cu_seq_q, ragged.seqused_k, ragged.blocks)
        new_keys = key.transpose(0, 1) if layer.stores else None
        new_values = value.transpose(0, 1) if layer.stores else None
        return self._kernel.attend(
            group.kernel_batch, query.transpose(0, 1), new_keys, new_values,
            pool.keys[layer.source], pool.values[layer.source], scaling, group.window, softcap,
        )  # fmt: skip

    def stores(self, layer: KvLayer, group: GroupPlan, dtype: torch.dtype) -> bool:
        """The kernel writes as it reads; it takes a layer with all of its rows or not at all."""
        if layer.kind is Kind.CROSS or layer.head_dim != layer.value_dim or not self._kernel.supports(dtype, layer.head_dim):
            return False
        if group.masked:
            return False
        return dtype is torch.float32 or all(rows.count <= _LONG for rows in group.rows)
