"""Drops rows of a video that show what the frame before showed already (efficient video sampling)."""

from __future__ import annotations

import torch

from services.models.media import Grid


def rows_left(rows: torch.Tensor, grid: Grid, count: int) -> torch.Tensor:
    """Which rows are left, ascending: all of the first step of time, then those that differ most from their place's row before.

    Source: Bagrov et al., "Efficient Video Sampling" (arXiv 2510.14624): unlikeness is one less the cosine between embeddings
    of one place in consecutive steps. The count is given, so that it is known before anything is encoded; of rows that
    differ equally the earlier ones stay.

    Args:
        rows: embeddings in the order of time, then place.  # [grid.t * places, hidden]
        grid: ``t`` steps of time.
        count: rows to be left, at least those of one step.
    """
    steps = rows.float().view(grid.t, -1, rows.shape[1])  # [steps, places, hidden]
    assert steps.shape[1] <= count <= len(rows), f"{count} of {grid.t} x {steps.shape[1]} rows"
    change = 1 - torch.cosine_similarity(steps[1:], steps[:-1], dim=-1)
    first = torch.full((steps.shape[1],), torch.inf)
    order = torch.cat([first, change.flatten()]).argsort(descending=True, stable=True)
    return order[:count].sort().values
