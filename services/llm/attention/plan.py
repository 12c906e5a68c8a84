"""Where a step's tokens stand in the pool: what attention needs to know of a step, layer group by layer group.

A step packs the tokens of many sequences into ``[1, tokens, hidden]``: rows ``[0, decodes)`` are decoding sequences, one
token each; the chunks of prefilling sequences follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch

from services.llm.attention.layers import KvLayer
from services.llm.attention.pool import KvPool

if TYPE_CHECKING:
    from services.llm.attention.cut import Cut


@dataclass
class Rows:
    """Consecutive tokens of one sequence: rows ``[start, start + count)`` of the step, behind ``context`` kept tokens.

    Attributes:
        blocks: ``[n]``, the blocks of tokens ``[0, context + count)``; -1 where a window has left them behind.
        prompt_masks: the family's own rule by layer type, ``[count, context + count]``; None: causal.
        media_mask: cross-attention only: ``[count, media rows]``, which rows each token sees.
    """

    start: int
    count: int
    context: int
    blocks: torch.Tensor
    prompt_masks: Mapping[str, torch.Tensor] | None = None
    media_mask: torch.Tensor | None = None
    _visible: dict[str, torch.Tensor | None] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Keys there are."""
        return self.context + self.count if self.media_mask is None else self.media_mask.shape[1]

    def first_key(self, window: int | None, block_size: int) -> int:
        """First key that any of the rows can see, rounded down to a block."""
        return 0 if window is None else max(0, self.context - window + 1) // block_size * block_size

    def visible(self, window: int | None, layer_type: str, first: int) -> torch.Tensor | None:
        """Which keys ``[first, length)`` each row sees, ``[count, length - first]``; None where that is plainly causal."""
        if self.media_mask is not None:
            return self.media_mask
        if self.prompt_masks is not None and layer_type in self.prompt_masks:
            return self.prompt_masks[layer_type][:, first:]
        if layer_type not in self._visible:
            self._visible[layer_type] = self._causal(window, first)
        return self._visible[layer_type]

    def _causal(self, window: int | None, first: int) -> torch.Tensor | None:
        if self.context == 0 and (window is None or self.count <= window):
            return None
        at = torch.arange(self.context, self.length, device=self.blocks.device)[:, None]
        keys = torch.arange(first, self.length, device=self.blocks.device)
        seen = keys <= at
        return seen if window is None else seen & (keys > at - window)


@dataclass(frozen=True)
class Ragged:
    """A step's sequences side by side, as a kernel for sequences of unequal length takes them; all int32.

    Attributes:
        cu_seq_q: ``[sequences + 1]``, where each one's rows begin; decodes first.
        cu_seq_k: ``[sequences + 1]``, where each one's keys would begin if all had ``max_k``.
        seqused_k: ``[sequences]``, keys that there are, counted in ``blocks``. The last query sees the last key.
        blocks: ``[sequences, n]``, from the first block that any of its rows sees, padded with the padding block.
    """

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    seqused_k: torch.Tensor
    blocks: torch.Tensor
    max_q: int
    max_k: int


@dataclass
class GroupPlan:
    """A step as the layers of one group see it.

    Attributes:
        window: tokens in the group's window.
        slots: ``[stored]``, where the step's keys and values go.
        decode_blocks: ``[decodes, n]``, the blocks that each decoding sequence attends to, padded with the padding block.
        decode_first: ``[decodes]``, first key that it sees, counted in ``decode_blocks``.
        decode_end: ``[decodes]``, one past its last key: the token itself.
        rows: prefill chunks; in cross-attention every sequence that has media.
    """

    window: int | None
    slots: torch.Tensor
    decodes: int
    decode_blocks: torch.Tensor
    decode_first: torch.Tensor
    decode_end: torch.Tensor
    rows: Sequence[Rows]
    _decode_mask: torch.Tensor | None = None
    _ragged: Ragged | None = None
    kernel_batch: Any = None  # a backend's own view of the group, made once a step

    @property
    def masked(self) -> bool:
        """Whether some rows have a mask of their own."""
        return any(rows.prompt_masks is not None or rows.media_mask is not None for rows in self.rows)

    def ragged(self, block_size: int, padding: int) -> Ragged:
        """All rows of an unmasked group in one table; made once a step, from device tensors alone if all are decodes."""
        if self._ragged is None:
            self._ragged = self._make_ragged(block_size, padding)
        return self._ragged

    def _make_ragged(self, block_size: int, padding: int) -> Ragged:
        device, decodes = self.decode_blocks.device, self.decodes
        firsts = [rows.first_key(self.window, block_size) for rows in self.rows]
        tables = [rows.blocks[first // block_size :] for rows, first in zip(self.rows, firsts, strict=True)]
        width = max(self.decode_blocks.shape[1], *(len(table) for table in tables), 1)
        counts = torch.arange(decodes + len(tables) + 1, dtype=torch.int32, device=device)
        cu_seq_k = counts * (width * block_size)
        if not tables:
            ends, blocks = self.decode_end.int(), self.decode_blocks.int()
            return Ragged(counts, cu_seq_k, ends, blocks, 1, width * block_size)
        assert all(a.start + a.count == b.start for a, b in pairwise(self.rows)) and self.rows[0].start == decodes
        starts = [*range(decodes), *(rows.start for rows in self.rows), self.rows[-1].start + self.rows[-1].count]
        used = [rows.length - first for rows, first in zip(self.rows, firsts, strict=True)]
        blocks = torch.full((decodes + len(tables), width), padding, dtype=torch.int32, device=device)
        blocks[:decodes, : self.decode_blocks.shape[1]] = self.decode_blocks
        for i, table in enumerate(tables, start=decodes):
            blocks[i, : len(table)] = table
        return Ragged(
            torch.tensor(starts, dtype=torch.int32, device=device),
            cu_seq_k,
            torch.cat([self.decode_end.int(), torch.tensor(used, dtype=torch.int32, device=device)]),
            blocks,
            max(rows.count for rows in self.rows),
            width * block_size,
        )

    def decode_mask(self, keys: int) -> torch.Tensor:
        """Which of the gathered keys each decoding sequence sees, ``[decodes, 1, 1, keys]``; made once a step."""
        if self._decode_mask is None:
            at = torch.arange(keys, device=self.decode_blocks.device)
            seen = at < self.decode_end[:, None]
            if self.window is not None:
                seen &= at >= self.decode_first[:, None]
            self._decode_mask = seen[:, None, None]
        return self._decode_mask


class Backend(Protocol):
    """Computes attention of one layer; its keys and values are in the pool already, unless the backend puts them there."""

    def stores(self, layer: KvLayer, group: GroupPlan, dtype: torch.dtype) -> bool:
        """Whether :meth:`attend` itself puts this step's keys and values into the pool."""
        return False

    def attend(
        self,
        pool: KvPool,
        layer: KvLayer,
        group: GroupPlan,
        query: torch.Tensor,  # [heads, tokens, head_dim]
        key: torch.Tensor,  # [kv_heads, tokens, head_dim], those of this step
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[tokens, heads, value_dim]``; zero for tokens that are in neither ``decodes`` nor ``rows``."""
        ...


@dataclass
class StepPlan:
    """One step. ``group_of`` maps a layer to its plan; both by layer index.

    ``cut`` is there where later layers see fewer rows than the first.
    """

    pool: KvPool
    backend: Backend
    layers: Mapping[int, KvLayer]
    group_of: Mapping[int, int]
    groups: list[GroupPlan]
    cut: Cut | None = None

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        layer = self.layers[module.layer_idx]
        group = self.groups[self.group_of[layer.index]]
        if layer.stores and len(group.slots) and not self.backend.stores(layer, group, query.dtype):
            self.pool.write(layer.index, group.slots, key, value)
        out = self.backend.attend(self.pool, layer, group, query, key, value, scaling, softcap)
        if self.cut is not None and layer.index == self.cut.layer - 1:
            self.cut.choose(self.pool.keys[layer.index], query, scaling, softcap)
        return out
