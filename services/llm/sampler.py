"""Chooses the next token of each sequence from its logits. A sequence's choices never depend on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; ``temperature`` 0 is greedy. Ranges are those of ``SamplingParams``."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class NanLogits(Exception):
    """A sequence's logits are not numbers; only that sequence fails."""


class TokenChooser:
    """Chooses the tokens of one sequence, with a random stream of its own."""

    def __init__(self, sampling: Sampling, banned_at_first: frozenset[int], min_tokens: int) -> None:
        self.sampling = sampling
        self._banned, self._min_tokens = sorted(banned_at_first), min_tokens
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor, tokens_so_far: int) -> int:
        """The next token, from logits ``[vocab]`` in float32.

        Raises:
            NanLogits: some logit is NaN.
        """
        if bool(torch.isnan(logits).any()):
            raise NanLogits
        if tokens_so_far < self._min_tokens and self._banned:
            logits = logits.clone()
            logits[self._banned] = -torch.inf
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = self._probabilities(logits.cpu())
        # The largest of p / Exp(1) falls on each token with probability p: one draw, whatever the filters left.
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int((probabilities / noise).argmax())

    def _probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        s = self.sampling
        # The largest logit becomes 0: divided by however small a temperature, it stays finite.
        probabilities = torch.softmax((logits - logits.max()) / s.temperature, dim=-1)
        if s.min_p > 0:
            probabilities[probabilities < s.min_p * probabilities.max()] = 0
        if 0 < s.top_k < len(probabilities):
            probabilities[probabilities < probabilities.topk(s.top_k).values[-1]] = 0
        if s.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            probabilities[order[before >= s.top_p * probabilities.sum()]] = 0
        return probabilities
