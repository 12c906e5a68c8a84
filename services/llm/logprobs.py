"""How likely tokens were under the model's raw logits: before penalties, temperature and constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROWS_AT_ONCE = 16


@dataclass(slots=True)
class Choice:
    """A chosen token; what follows it is None or empty unless log probabilities were asked for.

    Attributes:
        logprob: natural log probability under the raw logits.
        rank: place among all tokens under the raw logits, the likeliest being 1.
        top: the likeliest tokens with their log probabilities, likeliest first.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()


def logprobs(logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Choice]:
    """Each row's token under raw ``logits`` ``[len(tokens), vocab]``, with as many of the row's likeliest as ``tops`` says.

    A placeholder may lie past the last column; what is said of it means nothing.
    """
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).clamp(max=logits.shape[1] - 1)[:, None])
    scale = logits.logsumexp(-1, keepdim=True)
    ranks = (logits > chosen).sum(-1) + 1
    values, ids = logits.topk(min(max(tops), logits.shape[1]))
    columns = [(chosen - scale)[:, 0], ranks, values - scale, ids]
    rows = zip(tokens, tops, *(column.tolist() for column in columns), strict=True)
    return [
        Choice(token, logprob, rank, tuple(zip(likeliest[:top], likelihoods[:top], strict=True)))
        for token, top, logprob, rank, likelihoods, likeliest in rows
    ]


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int], top: int) -> list[Choice]:
    """As :func:`logprobs` for many rows: the token after each of them, and the ``top`` likeliest."""
    found: list[Choice] = []
    for at in range(0, len(next_tokens), _ROWS_AT_ONCE):
        tokens = next_tokens[at : at + _ROWS_AT_ONCE]
        found += logprobs(logits[at : at + _ROWS_AT_ONCE], tokens, [top] * len(tokens))
    return found
