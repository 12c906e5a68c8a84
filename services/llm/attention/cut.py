"""The rows of a step that layers from some depth on do not see: visual tokens that the last prompt token hardly looks at.

FastV (Chen et al. 2024, "An Image is Worth 1/2 Tokens After Layer 2"). How many tokens a prompt loses is known before it is
computed, which ones only at the layer before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.llm.attention.plan import Rows


@dataclass
class Visual:
    """A prompt's visual tokens.

    Attributes:
        runs: where they stand in the prompt, as sorted ``[start, stop)``.
        kept: ``[kept]``, tokens that were chosen to stay. Chosen once, when the prompt is first computed, so that the answer
            of a sequence that starts over goes on from the same tokens.
    """

    runs: Sequence[tuple[int, int]]
    kept: torch.Tensor | None = None

    def tokens(self) -> np.ndarray:
        """``[visual]``."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs])


@dataclass
class Stretch:
    """A chunk that holds all visual tokens and the end of its prompt; ``rows`` are those of the prompt, before the cut."""

    rows: Rows
    visual: Visual
    dropped: int


@dataclass
class Cut:
    """One step's cut.

    Attributes:
        layer: the first that sees fewer rows.
        counts: rows that are left of each chunk, in the step's order.
        rows: ``[rows left]``, those of the whole step, in order; set by :meth:`choose`.
    """

    layer: int
    counts: list[int]
    _stretches: Sequence[Stretch]
    _always: torch.Tensor  # rows that stay whatever is chosen
    rows: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: int, tokens: int, counts: list[int], stretches: Sequence[Stretch]) -> Cut:
        """The cut of a step of ``tokens`` rows."""
        stays = np.ones(tokens, dtype=bool)
        for s in stretches:
            stays[s.rows.start - s.rows.context + s.visual.tokens()] = False
        return cls(layer, counts, stretches, torch.from_numpy(stays.nonzero()[0]).to(stretches[0].rows.blocks.device))

    def choose(self, keys: torch.Tensor, query: torch.Tensor, scaling: float, softcap: float | None) -> None:
        """Choose what stays, at the layer before the cut.

        Args:
            keys: the layer's pool ``[blocks, block_size, kv_heads, head_dim]``, this step's own in their places.
            query: ``[heads, tokens, head_dim]``.
        """
        parts = [self._always]
        for s in self._stretches:
            if s.visual.kept is None:
                seen = keys[s.rows.blocks].flatten(0, 1)[: s.rows.length]
                weights = _attention(query[:, s.rows.start + s.rows.count - 1], seen, scaling, softcap)
                visual = torch.from_numpy(s.visual.tokens()).to(weights.device)
                order = weights[visual].sort(descending=True, stable=True).indices  # of equals the first
                s.visual.kept = visual[order[: len(visual) - s.dropped]]
            parts.append(s.visual.kept + (s.rows.start - s.rows.context))
        self.rows = torch.cat(parts).sort().values


def _attention(query: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """How much one token ``[heads, head_dim]`` attends to each of ``[keys, kv_heads, head_dim]``, in the mean over heads."""
    grouped = query.float().view(keys.shape[1], -1, keys.shape[2])  # heads that share keys stand together
    scores = grouped @ keys.float().permute(1, 2, 0) * scaling  # [kv_heads, heads per kv head, keys]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.softmax(scores, dim=-1).mean((0, 1))
