"""What each layer of a decoder keeps in the KV cache, found by running one token through it and watching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.llm.attention import hook
from services.llm.layer_groups import Kind


@dataclass(frozen=True)
class KvLayer:
    """One attention layer.

    Attributes:
        index: its ``layer_idx``.
        kind: which tokens it keeps: all, those in a window, or the rows of media (cross-attention).
        window: tokens in the window, the newest included.
        source: index of the layer whose keys and values it reads; its own, but in layers that share.
        layer_type: key of the family's own masks.
        softcap: bound that scores are squeezed into.
    """

    index: int
    kind: Kind
    window: int | None
    kv_heads: int
    head_dim: int
    value_dim: int
    source: int
    layer_type: str
    softcap: float | None = None

    @property
    def stores(self) -> bool:
        """Whether it writes keys and values of its own."""
        return self.source == self.index

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values."""
        return self.kv_heads * (self.head_dim + self.value_dim) * itemsize if self.stores else 0


class LayerProbe:
    """Stands in for a step and records what each layer brings; attention is zero."""

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[KvLayer] = []
        self._max_model_len = max_model_len

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
        index = int(module.layer_idx)
        types = getattr(module.config, "layer_types", None)
        layer_type = getattr(module, "layer_type", None) or (types[index] if types else "full_attention")
        if key.shape[1] != query.shape[1]:
            kind, window = Kind.CROSS, None
        elif window is not None and window < self._max_model_len:
            kind = Kind.SLIDING
        else:
            kind, window = Kind.FULL, None
        source = index
        if getattr(module, "is_kv_shared_layer", False):
            source = max(layer.index for layer in self.layers if layer.stores and layer.layer_type == layer_type)
        dims = key.shape[0], key.shape[2], value.shape[2]
        self.layers.append(KvLayer(index, kind, window, *dims, source, layer_type, softcap))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


@torch.inference_mode()
def probe_layers(decoder: Any, arguments: dict[str, Any], max_model_len: int) -> Sequence[KvLayer]:
    """The decoder's layers in order; ``arguments`` are those of a call with one token (and two cross-attention rows)."""
    probe = LayerProbe(max_model_len)
    token = hook.current.set(probe)
    try:
        decoder(**arguments)
    finally:
        hook.current.reset(token)
    return probe.layers
