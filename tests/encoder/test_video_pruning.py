"""Rows of videos that change least are dropped, as many as were planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_harness import running

from services.encoder.pruning import rows_left
from services.models.checkpoint import open_checkpoint
from services.models.media import Clip, Grid, ItemPlan, Modality
from services.models.video_plans import pruned
from tests.media_files import video
from triptych.common.v1 import media_pb2

Dirs = Callable[[str], Path]


def test_what_changed_is_left_and_the_first_step_whole() -> None:
    rows = torch.ones(12, 4)  # 3 steps of 4 places
    rows[5] = torch.tensor([1.0, -1, 0, 0])  # differs from before, and the next step from it
    rows[11] = torch.tensor([1.0, 1, 1, 0])  # differs a little
    assert rows_left(rows, Grid(3, 4, 4), 4).tolist() == [0, 1, 2, 3]
    assert rows_left(rows, Grid(3, 4, 4), 6).tolist() == [0, 1, 2, 3, 5, 9]
    assert rows_left(rows, Grid(3, 4, 4), 7).tolist() == [0, 1, 2, 3, 5, 9, 11]
    assert rows_left(rows, Grid(3, 4, 4), 8).tolist() == [0, 1, 2, 3, 4, 5, 9, 11]
    assert rows_left(rows, Grid(3, 4, 4), 12).tolist() == list(range(12))


@pytest.mark.parametrize("seed", range(5))
def test_the_rows_left_are_those_of_the_definition(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps, places, hidden = int(random.integers(1, 7)), int(random.integers(1, 9)), 16
    rows = random.standard_normal((steps, places, hidden))
    count = int(random.integers(places, steps * places + 1))
    change = {
        step * places + place: 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        for step in range(1, steps)
        for place, (a, b) in enumerate(zip(rows[step], rows[step - 1], strict=True))
    }
    most = sorted(change, key=lambda row: -change[row])[: count - places]
    found = rows_left(torch.from_numpy(rows).flatten(0, 1), Grid(steps, 1, 1), count)
    assert found.tolist() == sorted([*range(places), *most])


@pytest.mark.parametrize(
    ("rate", "left"), [(0.0, 40), (0.25, 30), (0.5, 20), (0.51, 19), (0.75, 10), (0.9, 8), (1.0, 8)], ids=str
)
def test_the_quota_is_a_share_and_at_least_a_step(rate: float, left: int) -> None:
    plan = ItemPlan(Modality.VIDEO, 40, Grid(5, 4, 8), 160)
    less = pruned(plan, rate)
    assert (less.rows, less.whole_rows, less.grid) == (left, 40 if left < 40 else 0, plan.grid)


@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"])
async def test_an_encoder_sends_what_is_left_and_says_what_it_is(checkpoint_dir: Dirs, family: str) -> None:
    path = checkpoint_dir(family)
    (plan,) = open_checkpoint(str(path)).plan([Clip(64, 48, 12, 25.0)])
    data = video(12)
    async with running(path) as client:

        def asked(plan: ItemPlan) -> dict[str, object]:
            grid = media_pb2.Grid(t=plan.grid.t, h=plan.grid.h, w=plan.grid.w)
            return {
                "modality": media_pb2.MODALITY_VIDEO, "data": data, "rows": plan.rows, "grid": grid, "frames": plan.frames,
                "times": plan.times, "patches": plan.patches, "whole_rows": plan.whole_rows,
            }  # fmt: skip

        less = pruned(plan, 0.3)
        assert 0 < less.rows < less.whole_rows == plan.rows
        whole, left = await client.fetch(await client.encode(**asked(plan)), await client.encode(**asked(less)))
        assert left.header is not None and whole.header is not None and not whole.header.kept_rows
        kept = torch.tensor(left.header.kept_rows)
        assert kept.tolist() == rows_left(whole.rows(), plan.grid, less.rows).tolist()
        assert left.rows().equal(whole.rows()[kept])
        places = plan.rows // plan.grid.t
        for wrong in ({"rows": places - 1}, {"rows": plan.rows}, {"whole_rows": 7}):
            with pytest.raises(Exception, match="whole_rows"):
                await client.encode(**(asked(less) | wrong))
        with pytest.raises(Exception, match="can be pruned"):
            await client.encode(**(asked(less) | {"modality": media_pb2.MODALITY_IMAGE}))
