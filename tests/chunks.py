"""Rows of embeddings in a message of their own."""

from __future__ import annotations

import torch

from services.models.wire import put_chunk
from triptych.common.v1 import tensor_pb2


def to_chunk(rows: torch.Tensor, row_offset: int, total_rows: int) -> tensor_pb2.TensorChunk:
    chunk = tensor_pb2.TensorChunk()
    chunk.data = put_chunk(chunk, rows, row_offset, total_rows).tobytes()
    return chunk
