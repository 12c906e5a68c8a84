"""Rows of embeddings as messages and back. Knows nothing of streams, refs or checkpoints."""

from __future__ import annotations

import sys
import warnings

import torch
import xxhash

from triptych.common.v1 import tensor_pb2

assert sys.byteorder == "little", "tensors travel little-endian and are not swapped"

warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to rows that arrived
_TO_WIRE = {
    torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: tensor_pb2.DATA_TYPE_FLOAT16,
}
_FROM_WIRE = {wire: dtype for dtype, wire in _TO_WIRE.items()}


def wire_dtype(dtype: torch.dtype) -> tensor_pb2.DataType.ValueType:
    """The wire's name of an element type."""
    return _TO_WIRE[dtype]


def torch_dtype(dtype: tensor_pb2.DataType.ValueType) -> torch.dtype:
    """The element type behind the wire's name.

    Raises:
        ValueError: the name is not one of ours.
    """
    if dtype not in _FROM_WIRE:
        raise ValueError(f"element type {dtype} is not known; known are float32, bfloat16 and float16")
    return _FROM_WIRE[dtype]


def put_chunk(chunk: tensor_pb2.TensorChunk, rows: torch.Tensor, row_offset: int, total_rows: int) -> memoryview:
    """Write what is said of consecutive rows of a matrix of ``total_rows`` rows into an empty message, all but ``data``.

    Args:
        chunk: the message.
        rows: on the CPU.  # [num_rows, hidden]
        row_offset: index of the first of them within the matrix.
        total_rows: rows of the matrix.

    Returns:
        The bytes of the rows, which belong into ``data``.
    """
    assert rows.dim() == 2 and row_offset + rows.shape[0] <= total_rows, f"{tuple(rows.shape)} at {row_offset} of {total_rows}"
    data = rows.contiguous().view(torch.uint8).numpy().data.cast("B") if rows.numel() else memoryview(b"")
    chunk.xxh3 = xxhash.xxh3_64_intdigest(data)  # brings it into the cache, from where it is copied
    chunk.shape.extend(rows.shape)
    chunk.dtype = wire_dtype(rows.dtype)
    chunk.row_offset, chunk.total_rows = row_offset, total_rows
    return data


def from_chunk(chunk: tensor_pb2.TensorChunk, data: memoryview | None = None) -> torch.Tensor:
    """The rows of a chunk, in memory that must not be written to: of their own, or ``data`` where that is given.

    Args:
        chunk: what is said of the rows.
        data: their bytes, if they are not in the chunk.

    Returns:
        ``[num_rows, hidden]``.

    Raises:
        ValueError: the chunk contradicts itself or was damaged on the way.
    """
    dtype = torch_dtype(chunk.dtype)
    if len(chunk.shape) != 2:
        raise ValueError(f"a chunk's shape has 2 extents, this one has {len(chunk.shape)}")
    rows, hidden = chunk.shape
    if chunk.row_offset + rows > chunk.total_rows:
        raise ValueError(f"rows {chunk.row_offset} to {chunk.row_offset + rows} of a tensor of {chunk.total_rows} rows")
    data = memoryview(chunk.data if data is None else data)  # each access of .data copies
    expected = rows * hidden * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"a chunk of {rows} x {hidden} elements of {dtype.itemsize} bytes has {expected} bytes, got {len(data)}")
    if xxhash.xxh3_64_intdigest(data) != chunk.xxh3:
        raise ValueError("a chunk's checksum does not match its data: it was damaged on the way")
    if not data:
        return torch.empty(rows, hidden, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(rows, hidden)


def varint(value: int) -> bytes:
    """A number as protobuf writes lengths and tags: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
