"""A stack that drops rows of videos: a smaller, exact count, and the answer of what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.local_stack import local_stack
from services.encoder.pruning import rows_left
from services.gateway.config import GatewayConfig
from services.gateway.model import ServedModel
from services.models.checkpoint import open_checkpoint
from services.models.media import Grid, Modality
from services.models.registry import UnsupportedModel
from tests.oracle import catalogue
from tests.reference import NEW_TOKENS, Ask, Oracle
from tests.stack.conftest import RunningStack
from tests.stack.real_media import FILES, video_file
from tests.stack.test_equals_generate import chat_request

RATE = 0.6


@pytest.mark.asyncio
async def test_answers_are_those_of_the_rows_that_are_left(
    checkpoint_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_dir("qwen2_5_vl")
    checkpoint, oracle = open_checkpoint(str(path)), Oracle(path)
    monkeypatch.setenv("TRIPTYCH_VIDEO_PRUNING_RATE", str(RATE))
    with local_stack("--model", str(path), "--dtype", "float32", log_dir=tmp_path, quiet=True) as local:
        stack = RunningStack(local, tmp_path)
        for name in ("band.mp4", "band_uneven.mp4", "band_still.mp4"):
            ask = Ask([("user", [video_file(FILES[name], checkpoint), "what is this ?"])])
            inputs = oracle.inputs(ask)
            (item,) = catalogue("ITEMS")["qwen2_5_vl"](oracle.model, inputs)
            t, h, w = item.grid.t, item.grid.h, item.grid.w
            count = max(len(item.rows) // t, int(len(item.rows) * (1 - RATE)))
            assert (count < len(item.rows)) == (name != "band_still.mp4"), "a single step is left whole"
            kept = rows_left(item.rows, Grid(t, h, w), count)
            places = (inputs["input_ids"][0] == checkpoint.placeholder_id(Modality.VIDEO)).nonzero().flatten()
            left = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
            left[places] = False
            left[places[kept]] = True
            tokens, responses = await stack.tokens(chat_request(ask))
            assert tokens == oracle.tokens_without(inputs, left.nonzero().flatten(), NEW_TOKENS)
            usage = responses[-1].done.usage
            assert (usage.prompt_tokens_details.video, usage.prompt_tokens) == (count, int(left.sum()))


def test_a_model_whose_videos_cannot_be_pruned_is_refused(checkpoint_dir: Callable[[str], Path]) -> None:
    config = GatewayConfig(model=str(checkpoint_dir("internvl")), llm="127.0.0.1:1", video_pruning_rate=0.5)
    with pytest.raises(UnsupportedModel, match="--video-pruning-rate"):
        ServedModel(config)
    with pytest.raises(ValueError, match="less than 1"):
        GatewayConfig(llm="127.0.0.1:1", video_pruning_rate=1.0)
