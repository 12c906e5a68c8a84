"""Attention on CUDA with torch's own paged kernel: one ragged call per layer, decodes and prefill chunks together.

The kernel is FlashAttention 2 behind ``torch.nn.attention.varlen``. It takes what :func:`refusal` lets through; every
other layer, and every layer of a step that holds a prompt with a mask of its own (Gemma 3, PaliGemma), goes through
:class:`~services.llm.attention.gathered.GatheredBackend`.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.varlen import varlen_attn

from services.llm.attention.gathered import GatheredBackend
from services.llm.attention.layers import KvLayer
from services.llm.attention.plan import Backend, GroupPlan
from services.llm.attention.pool import KvPool
from services.llm.layer_groups import Kind

PAGE = 256  # the kernel takes blocks of a multiple of so many tokens
HALF = (torch.bfloat16, torch.float16)


def unusable(device: str) -> str | None:
    """Why the kernel cannot run on a device at all, as the end of a sentence; None if it can."""
    if not device.startswith("cuda"):
        return f"it needs a CUDA device and this process computes on {device}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no FlashAttention"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or higher"
    return None


@functools.cache
def refusal(layer: KvLayer, dtype: torch.dtype, block_size: int) -> str | None:
    """Why a layer goes through the gathered path for good; None if the kernel takes it."""
    if layer.kind is Kind.CROSS:
        return "cross-attention has a mask of its own"
    if layer.softcap is not None:
        return "the kernel has no soft cap"
    if dtype not in HALF:
        return f"the kernel computes in 16 bits, not in {dtype}"
    if layer.head_dim != layer.value_dim or layer.head_dim % 8 or layer.head_dim > 256:
        return f"the kernel takes no heads of {layer.head_dim} and values of {layer.value_dim}"
    if block_size % PAGE:
        return f"the kernel takes blocks of a multiple of {PAGE} tokens, not of {block_size}"
    return None


class CudaBackend(Backend):
    """One kernel call per layer where the kernel can, the gathered path where it cannot."""

    def __init__(self) -> None:
        self._gathered = GatheredBackend()

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
        assert softcap == layer.softcap
        keys = pool.keys[layer.source]  # [blocks, block_size, kv_heads, head_dim]
        if group.masked or refusal(layer, keys.dtype, pool.block_size):
            return self._gathered.attend(pool, layer, group, query, key, value, scaling, softcap)
        ragged = group.ragged(pool.block_size, len(keys) - 1)
        # a lone token sees all keys either way; without a bound the kernel shares keys among the heads of a group
        causal = (-1, -1) if ragged.max_q == 1 else (-1, 0)
        window = causal if group.window is None else (group.window - 1, 0)
        # num_splits: with more than one split, 2.13 leaves rows of a paged batch unwritten (pytorch#194167); with one, a
        # sequence's values do not depend on who else is in the step. Not varlen_attn_out: the kernel reshapes ``out`` there.
        out = varlen_attn(
            query.transpose(0, 1), keys, pool.values[layer.source], ragged.cu_seq_q, ragged.cu_seq_k, ragged.max_q, ragged.max_k,
            scale=scaling, window_size=window, enable_gqa=query.shape[0] != layer.kv_heads,
            seqused_k=ragged.seqused_k, block_table=ragged.blocks, num_splits=1,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out
