"""Which tokens a sequence holds so far, kept up to date token by token: what penalties need to know."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch


class Occurrences:
    """Distinct tokens with the number of times that the answer holds each.

    Args:
        prompt: tokens of the prompt that count as seen, though not as part of the answer.
    """

    def __init__(self, prompt: Collection[int]) -> None:
        distinct = sorted(set(prompt))
        self._place = {token: at for at, token in enumerate(distinct)}
        self._tokens = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._place)

    @property
    def tokens(self) -> torch.Tensor:
        """``[distinct]``; shares memory with this object."""
        return torch.from_numpy(self._tokens[: len(self)])

    @property
    def counts(self) -> torch.Tensor:
        """Times in the answer, ``[distinct]`` in float32; shares memory with this object."""
        return torch.from_numpy(self._counts[: len(self)])

    def add(self, token: int) -> None:
        """The answer holds ``token`` once more."""
        at = self._place.setdefault(token, len(self._place))
        if at == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(at + 16, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(at + 16, dtype=np.float32)])
        self._tokens[at] = token
        self._counts[at] += 1

    def copy(self) -> Occurrences:
        """One that goes its own way from here."""
        other = Occurrences(())
        other._place, other._tokens, other._counts = dict(self._place), self._tokens.copy(), self._counts.copy()
        return other
