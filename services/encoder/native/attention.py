"""Attention of a tower's rows to one another, none hidden, by products of tiles (AMX), in bfloat16.

Knows no model family: registered with transformers under a name of its own, it takes the calls that torch's attention would get
without a mask and hands the others on.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.models.hf import masking_utils, transformers
from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

NAME = "triptych_towers"
_SOURCE = Path(__file__).with_name("attention_kernel.cpp")
_FEWEST_KEYS = 64  # with fewer there is too little to multiply
_TOLERANCE = 2e-2  # relative to the largest result: both round to bfloat16 on the way


class _Rows(ctypes.Structure):
    """One tensor ``[heads, rows, width]`` as the kernel reads it; strides count numbers."""

    _fields_ = (("data", ctypes.c_void_p), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class TileAttention:
    """Softmax attention without mask.

    Raises:
        Unavailable: this machine has no compiler or multiplies no tiles, or the results are not torch's.
    """

    def __init__(self) -> None:
        library, pointer, count = load_library(_SOURCE), ctypes.c_void_p, ctypes.c_int64
        if not library.triptych_tower_attention_allowed():
            raise Unavailable("this CPU does not multiply tiles")
        self._attend = library.triptych_tower_attention
        rows = ctypes.POINTER(_Rows)
        self._attend.argtypes = (rows, rows, rows, pointer, count, count, count, count, ctypes.c_float, ctypes.c_int)
        self._attend.restype = None
        self._check()

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the kernel serves these, each ``[batch, heads, rows, width]``."""
        return (
            key.shape == value.shape
            and query.shape[:2] == key.shape[:2]
            and query.shape[3] == key.shape[3]
            and key.shape[2] >= _FEWEST_KEYS
            and all(
                x.dtype is torch.bfloat16 and x.device.type == "cpu" and x.stride(3) == 1 and not x.requires_grad
                for x in (query, key, value)
            )
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """What :meth:`takes` to ``[batch, rows of query, heads, width]``; ``scaling`` is positive."""
        batch, heads, queries, width = query.shape
        out = torch.empty(batch, queries, heads, width, dtype=query.dtype)
        for one in range(batch):
            rows = [_Rows(x[one].data_ptr(), x.stride(1), x.stride(2)) for x in (query, key, value)]
            self._attend(
                *rows, out[one].data_ptr(), heads, queries, key.shape[2], width, scaling, torch.get_num_threads()
            )  # fmt: skip
        return out

    def _check(self) -> None:
        """Compare with torch on random inputs, laid out as towers have them."""
        random = torch.Generator().manual_seed(0)
        for rows, width in ((64, 64), (77, 80), (130, 72)):
            qkv = torch.randn(2, rows, 3, 2, width, generator=random).to(torch.bfloat16)
            query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))
            want = F.scaled_dot_product_attention(query, key, value, scale=0.2).transpose(1, 2)
            got = self(query, key, value, 0.2)
            if not torch.allclose(want, got, rtol=0, atol=_TOLERANCE * float(want.abs().max())):
                raise Unavailable("attention by tiles gives other results than torch's")


@functools.cache
def _native() -> TileAttention | None:
    try:
        return TileAttention()
    except Unavailable as reason:
        logger.debug("towers attend by torch: %s", reason)
        return None


def _attention(
    module: Any,
    query: torch.Tensor,  # [batch, heads, rows, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    native, causal = _native(), getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and position_bias is None and not causal and not dropout
    if native and plain and native.takes(query, key, value):
        return native(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    return transformers.integrations.sdpa_attention.sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **others
    )


transformers.AttentionInterface.register(NAME, _attention)
transformers.AttentionMaskInterface.register(NAME, masking_utils.sdpa_mask)


def replace_attention(towers: nn.Module, dtype: torch.dtype) -> int:
    """Let the parts that call torch's attention call ours, where this machine has it; returns how many configurations say so."""
    if dtype is not torch.bfloat16 or _native() is None:
        return 0
    configs = {id(config): config for module in towers.modules() if (config := getattr(module, "config", None)) is not None}
    changed = [config for config in configs.values() if config._attn_implementation == "sdpa"]
    for config in changed:
        config._attn_implementation = NAME
    logger.info("attention of %d configurations runs by tiles", len(changed))
    return len(changed)
