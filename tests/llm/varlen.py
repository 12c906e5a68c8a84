"""torch's paged ``varlen_attn`` in plain torch: what its documentation says, refusing what its kernel refuses."""

from __future__ import annotations

from itertools import pairwise

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """``[tokens, heads, head_dim]``; reads no page behind a sequence's last key."""
    sequences, pages = block_table.shape
    page = key.shape[1]
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
    assert cu_seq_q.shape == cu_seq_k.shape == (sequences + 1,) and seqused_k.shape == (sequences,)
    assert cu_seq_k.tolist() == [i * max_k for i in range(sequences + 1)] and max_k == pages * page and num_splits == 1
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and key.shape == value.shape
    assert enable_gqa == (query.shape[1] != key.shape[2])
    starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
    assert starts[0] == 0 and starts[-1] == len(query) and max(b - a for a, b in pairwise(starts)) == max_q
    left, right = window_size
    out = torch.full_like(query, torch.nan)
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        held = block_table[i, : -(-length // page)].long()
        keys, values = (pool[held].flatten(0, 1)[:length].transpose(0, 1) for pool in (key, value))  # [kv_heads, length, dim]
        count = starts[i + 1] - starts[i]
        at = torch.arange(length - count, length)[:, None]
        seen = torch.ones(count, length, dtype=torch.bool)
        if left >= 0:
            seen &= torch.arange(length) >= at - left
        if right >= 0:
            seen &= torch.arange(length) <= at + right
        heads = query.shape[1] // keys.shape[0]
        scores = query[rows].transpose(0, 1).float() @ keys.repeat_interleave(heads, 0).transpose(1, 2).float() * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = (weights @ values.repeat_interleave(heads, 0).float()).transpose(0, 1).to(out.dtype)
    return out
