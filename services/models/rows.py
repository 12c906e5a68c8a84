"""How the features of an item lie in one block of memory: one behind the other, each from a multiple of 64 bytes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_ALIGNED = 64


def block_bytes(rows: int, features: Sequence[tuple[int, torch.dtype]]) -> int:
    """Bytes of a block for features of ``rows`` rows each, given elements per row and element type of each."""
    return sum(_size(rows, *feature) for feature in features)


def split_block(block: torch.Tensor, rows: int, features: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Views of a block of uint8, each [rows, hidden]."""
    return [
        block[offset : offset + rows * hidden * dtype.itemsize].view(dtype).view(rows, hidden)
        for offset, (hidden, dtype) in zip(_offsets(rows, features), features, strict=True)
    ]


def _offsets(rows: int, features: Sequence[tuple[int, torch.dtype]]) -> Iterator[int]:
    offset = 0
    for feature in features:
        yield offset
        offset += _size(rows, *feature)


def _size(rows: int, hidden: int, dtype: torch.dtype) -> int:
    return -(-rows * hidden * dtype.itemsize // _ALIGNED) * _ALIGNED
