"""Rows to chunks and back."""

from __future__ import annotations

import pytest
import torch

from services.models.wire import from_chunk
from tests.chunks import to_chunk
from triptych.common.v1 import tensor_pb2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    whole = torch.randn(7, 5).to(dtype)
    chunk = to_chunk(whole[2:5], 2, 7)
    assert (list(chunk.shape), chunk.row_offset, chunk.total_rows, len(chunk.data)) == ([3, 5], 2, 7, 15 * dtype.itemsize)
    rows = from_chunk(chunk)
    assert rows.dtype is dtype and torch.equal(rows, whole[2:5])


def test_rows_that_are_not_contiguous_are_sent_in_row_major_order() -> None:
    whole = torch.randn(5, 7)
    assert torch.equal(from_chunk(to_chunk(whole.T[1:3], 1, 7)), whole.T[1:3])


def test_no_rows_are_a_chunk_too() -> None:
    assert from_chunk(to_chunk(torch.empty(0, 4), 3, 3)).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": b"\0" * 59}, "has 60 bytes, got 59"),
        ({"xxh3": 1}, "checksum"),
        ({"dtype": tensor_pb2.DATA_TYPE_UNSPECIFIED}, "element type 0"),
        ({"dtype": 99}, "element type 99"),
        ({"shape": [3]}, "2 extents"),
        ({"shape": [3, 6]}, "has 72 bytes, got 60"),
        ({"shape": [2**31, 2**31]}, "rows 2 to"),
        ({"row_offset": 5}, "rows 5 to 8 of a tensor of 7"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(change: dict, text: str) -> None:
    chunk = to_chunk(torch.randn(3, 5), 2, 7)
    fields = {d.name: getattr(chunk, d.name) for d in chunk.DESCRIPTOR.fields} | change
    with pytest.raises(ValueError, match=text):
        from_chunk(tensor_pb2.TensorChunk(**fields))
