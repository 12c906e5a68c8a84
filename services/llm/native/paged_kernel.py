"""Builds, checks and calls ``paged_kernel.cpp``: attention over the paged pool on a CPU, without gathering blocks first.

The kernel is compared with torch before it is trusted. Without a compiler, or when it cannot be built, loaded or trusted,
:func:`load` returns None and says so once; callers then use torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from services.native.build import Unavailable, load_library

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_LANES = 16  # head_dim must be a multiple: the kernel handles this many floats at once
_DTYPES = (torch.float32, torch.bfloat16)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("sequences", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size")),
        *((name, ctypes.c_void_p) for name in ("query",)),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head")),
        ("key", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head")),
        ("value", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("value_row", "value_head")),
        *((name, ctypes.c_void_p) for name in ("pool_keys", "pool_values", "out")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True)
class PagedBatch:
    """Where the sequences of a step stand in the pool; shared by the step's layers. Every tensor is int32, dense, on the CPU.

    Attributes:
        query_starts: ``[sequences + 1]``: rows ``[query_starts[i], query_starts[i + 1])`` are the newest tokens of sequence i.
        lengths: ``[sequences]``: tokens of each sequence, its new ones included.
        tables: ``[sequences, columns]``: blocks; entries past a sequence's length are never read.
    """

    query_starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor

    def __post_init__(self) -> None:
        for tensor in (self.query_starts, self.lengths, self.tables):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous() and not tensor.is_cuda
        assert len(self.query_starts) == len(self.lengths) + 1 == len(self.tables) + 1

    @functools.cached_property
    def _address(self) -> ctypes.c_void_p:
        batch = _Batch(
            len(self.lengths),
            self.query_starts.data_ptr(),
            self.lengths.data_ptr(),
            self.tables.data_ptr(),
            self.tables.shape[1],
        )
        return ctypes.cast(ctypes.pointer(batch), ctypes.c_void_p)  # keeps the structure alive


class PagedKernel:
    """The loaded library. Safe to share between threads that use different pools."""

    def __init__(self) -> None:
        loaded = load_library(_SOURCE)
        self._attend = {torch.float32: loaded.triptych_attend_float32, torch.bfloat16: loaded.triptych_attend_bfloat16}
        for function in self._attend.values():
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
            function.restype = None

    @staticmethod
    def supports(dtype: torch.dtype, head_dim: int) -> bool:
        """Whether a pool of this type and width can be attended over."""
        return dtype in _DTYPES and head_dim % _LANES == 0

    def attend(
        self,
        batch: PagedBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Put the new tokens' keys and values into the pool and attend, causally.

        Args:
            batch: where the rows' sequences stand.
            query: ``[rows, heads, head_dim]``; heads that share keys stand together. Any strides, the last axis dense.
            key: ``[rows, kv_heads, head_dim]``, likewise; None, with ``value``: the pool holds the new tokens already.
            value: as ``key``.
            pool_keys: ``[blocks, block_size, kv_heads, head_dim]``, dense, of the type of ``query``.
            pool_values: as ``pool_keys``.
            scale: factor on the scores.
            window: tokens that a query sees, itself included; None: all before it.
            softcap: ``cap * tanh(score / cap)``; None: none.

        Returns:
            ``[rows, heads, head_dim]``, dense.
        """
        rows, heads, head_dim = query.shape
        _, block_size, kv_heads, _ = pool_keys.shape
        assert query.dtype == pool_keys.dtype == pool_values.dtype and pool_keys.is_contiguous() and pool_values.is_contiguous()
        assert query.stride(2) == 1 and head_dim % _LANES == 0
        out = torch.empty(rows, heads, head_dim, dtype=query.dtype)
        new: tuple[int | None, ...] = (None, 0, 0, None, 0, 0)
        if key is not None and value is not None:
            assert key.stride(2) == value.stride(2) == 1 and key.dtype == value.dtype == query.dtype
            new = (key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(), value.stride(0), value.stride(1))
        layer = _Layer(
            heads,
            kv_heads,
            head_dim,
            block_size,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            *new,
            pool_keys.data_ptr(),
            pool_values.data_ptr(),
            out.data_ptr(),
            window or 0,
            scale,
            softcap or 0.0,
        )
        self._attend[query.dtype](batch._address, ctypes.addressof(layer), torch.get_num_threads())
        return out


@functools.cache
def load() -> PagedKernel | None:
    """The kernel for this machine, built if need be; None, with one line in the log, where there can be none."""
    try:
        kernel = PagedKernel()
        _check(kernel)
    except Unavailable as error:
        logger.warning("attention runs on torch, slower, because the paged kernel is not available: %s", error)
        return None
    return kernel


def _check(kernel: PagedKernel) -> None:
    """Compare with torch on random sequences.

    Raises:
        Unavailable: they differ.
    """
    random = torch.Generator().manual_seed(0)
    counts, contexts, heads, kv_heads, width, size = (1, 5), (35, 4), 6, 2, 64, 8
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        pools = [torch.full((16, size, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]
        tables = torch.randperm(16, generator=random).to(torch.int32).view(2, 8)
        keys, values = (
            [torch.randn(n + c, kv_heads, width, generator=random).to(dtype) for n, c in zip(counts, contexts, strict=True)]
            for _ in range(2)
        )
        query = torch.randn(sum(counts), heads, width, generator=random).to(dtype)
        for i, context in enumerate(contexts):
            slots = torch.arange(context)
            for pool, rows in zip(pools, (keys[i], values[i]), strict=True):
                pool[tables[i][slots // size].long(), slots % size] = rows[:context]
        batch = PagedBatch(
            torch.tensor([0, 1, 6], dtype=torch.int32),
            torch.tensor([n + c for n, c in zip(counts, contexts, strict=True)], dtype=torch.int32),
            tables,
        )
        new = [torch.cat([rows[c:] for rows, c in zip(both, contexts, strict=True)]) for both in (keys, values)]
        got = kernel.attend(batch, query, new[0], new[1], pools[0], pools[1], width**-0.5)
        want = torch.cat(
            [
                F.scaled_dot_product_attention(
                    rows.transpose(0, 1).float(),
                    k.transpose(0, 1).float(),
                    v.transpose(0, 1).float(),
                    attn_mask=torch.ones(len(rows), len(k), dtype=torch.bool).tril(len(k) - len(rows)),
                    enable_gqa=True,
                ).transpose(0, 1)
                for rows, k, v in zip(query.split(counts), keys, values, strict=True)  # type: ignore[no-untyped-call]
            ]
        )
        if not torch.allclose(got.float(), want, rtol=tolerance, atol=tolerance):
            raise Unavailable(f"its {dtype} results differ from torch's by {float((got.float() - want).abs().max()):.1e}")
