"""Which frames of a video are taken, what they cost and how prompts spell them, held equal to the video processors.

The processors really run, on tensors without memory: only shapes are computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.hf import transformers
from services.models.layout import PromptLayout
from services.models.media import ALL_FRAMES, Clip, Grid, ItemPlan, Modality, Sampling

Directory = Callable[[str], Path]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker", "llava_onevision", "internvl"]
RATES = [1.0, 2.0, 5.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]


def load(path: Path) -> tuple[Checkpoint, Any]:
    return open_checkpoint(str(path)), transformers.AutoProcessor.from_pretrained(path)


def clips(seed: str, count: int, longest: int) -> Iterator[Clip]:
    dice = random.Random(seed)
    for _ in range(count):
        width, height = (round(2 ** dice.uniform(2, 11)) for _ in range(2))
        if max(width, height) <= 100 * min(width, height):
            yield Clip(width, height, round(longest ** dice.uniform(0.1, 1)) + 1, dice.choice(RATES))


def prepare(processor: Any, clip: Clip, sampling: Sampling) -> tuple[Any, str]:
    """What the processor makes of a clip whose frames it samples itself, and what it writes for it."""
    blank = torch.empty((clip.frames, 3, clip.height, clip.width), dtype=torch.uint8, device="meta")
    facts = dict(fps=clip.fps, total_num_frames=clip.frames, duration=clip.frames / clip.fps)
    facts["frames_indices"] = list(range(clip.frames))
    chosen = processor._merge_kwargs()
    own = dict(video_metadata=[facts], do_sample_frames=sampling != ALL_FRAMES, return_metadata=True)
    chosen["videos_kwargs"] |= own | {"fps": sampling.fps, "num_frames": sampling.frames, "input_data_format": "channels_first"}
    flat = {} if "Omni" in type(processor).__name__ else chosen.pop("videos_kwargs")
    inputs, [text] = processor._process_videos([blank], **(flat or chosen))
    return inputs, text


def written(checkpoint: Checkpoint, plan: ItemPlan) -> str:
    token = PromptLayout(checkpoint).tokenizer.fast.id_to_token(checkpoint.placeholder_id(Modality.VIDEO))
    return "".join(part if isinstance(part, str) else token * part for part in plan.spelling)


def check(family: str, checkpoint: Checkpoint, processor: Any, clip: Clip, sampling: Sampling) -> None:
    inputs, text = prepare(processor, clip, sampling)
    [plan] = checkpoint.plan([clip], sampling)
    assert list(plan.frames) == [int(i) for i in inputs["video_metadata"][0].frames_indices][: len(plan.frames)], (clip, sampling)
    assert plan.times == tuple(i / clip.fps for i in plan.frames)
    assert written(checkpoint, plan) == text, (clip, sampling)
    if "video_grid_thw" in inputs:
        assert plan.grid == Grid(*inputs["video_grid_thw"][0].tolist()), (clip, sampling)
        assert plan.patches == len(inputs["pixel_values_videos"])
    else:
        assert plan.tiles == len(inputs["pixel_values_videos"][0])
    if family == "qwen2_5_vl":
        assert plan.seconds_per_grid == pytest.approx(float(inputs["second_per_grid_ts"][0]))
    if family == "qwen2_5_omni_thinker" and sampling.fps is None:
        assert plan.seconds_per_grid == float(inputs["video_second_per_grid"][0]) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_all_frames(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    for clip in clips(family, 60, 40):
        check(family, checkpoint, processor, clip, ALL_FRAMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_at_a_rate(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    for clip in clips(f"rate {family}", 60, 2000):
        for fps in (0.5, 1.0, 2.0):
            wanted = clip.frames / clip.fps * fps
            if clip.frames < 4 or not 1 <= wanted <= clip.frames:
                continue  # the processors divide by zero or refuse
            check(family, checkpoint, processor, clip, Sampling(fps=fps))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_of_frames(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    dice = random.Random(family)
    for clip in clips(f"number {family}", 60, 3000):
        count = dice.randint(2, 40)
        if count + 1 < clip.frames:
            check(family, checkpoint, processor, clip, Sampling(frames=count))
