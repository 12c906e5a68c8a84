"""Where a step's tokens stand in the pool: what attention needs to know of a step, layer group by layer group.

A step packs the tokens of many sequences into ``[1, tokens, hidden]``: rows ``[0, decodes)`` are decoding sequences, one
token each; the chunks of prefilling sequences follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """Computes attention of one layer, its keys and values being in the pool already."""

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
        if layer.stores and len(group.slots):
            self.pool.write(layer.index, group.slots, key, value)
        if self.cut is not None and layer.index == self.cut.layer - 1:
            self.cut.choose(self.pool.keys[layer.index], query, scaling, softcap)
        return self.backend.attend(self.pool, layer, group, query, key, value, scaling, softcap)
