"""Keys and values of every layer, in blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.llm.attention.layers import KvLayer


class KvPool:
    """One tensor of keys and one of values per storing layer: ``[num_blocks + 1, block_size, kv_heads, head_dim]``.

    Layers of a group have the same number of blocks. The last block belongs to nobody and stays zero: block tables of
    unequal length are padded with it. Two gather buffers are shared by all layers: a fresh buffer per layer costs more
    than the attention itself.
    """

    def __init__(
        self, layers: Sequence[tuple[KvLayer, int]], num_blocks: Sequence[int], block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        """``layers``: each with the group that it keeps its own keys in; ``num_blocks`` by group."""
        self.block_size, self.num_blocks = block_size, list(num_blocks)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._of_group: list[list[torch.Tensor]] = [[] for _ in num_blocks]
        for layer, group in layers:
            if layer.stores:
                shape = (num_blocks[group] + 1, block_size, layer.kv_heads)
                self.keys[layer.index] = torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device)
                self.values[layer.index] = torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device)
                self._of_group[group] += [self.keys[layer.index], self.values[layer.index]]
        self._buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values ``[kv_heads, tokens, head_dim]`` at ``slots`` ``[tokens]`` (block * block_size + position)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys.transpose(0, 1))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values.transpose(0, 1))

    def clear(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Fill blocks, given as (group, block), with zeros."""
        for group, tensors in enumerate(self._of_group):
            if chosen := [block for g, block in blocks if g == group]:
                for tensor in tensors:
                    tensor[chosen] = 0

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks, given as (group, from, to)."""
        for group, source, target in copies:
            for tensor in self._of_group[group]:
                tensor[target] = tensor[source]

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks ``[batch, n]`` as keys and values ``[batch, kv_heads, n * block_size, head_dim]``, valid until the next call."""
        return self._gather(0, self.keys[layer], blocks), self._gather(1, self.values[layer], blocks)

    def _gather(self, which: int, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        batch, count = blocks.shape
        width = pool[0].numel()
        if self._buffers[which].numel() < batch * count * width:
            self._buffers[which] = pool.new_empty(batch * count * width)
        out = self._buffers[which][: batch * count * width].view(batch * count, width)
        torch.index_select(pool.flatten(1), 0, blocks.flatten(), out=out)
        return out.view(batch, count * self.block_size, *pool.shape[2:]).transpose(1, 2)
