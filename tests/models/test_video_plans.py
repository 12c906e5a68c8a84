"""Which frames of a video are taken, what they cost and how prompts spell them, held equal to the video processors.

The processors really run, on tensors without memory: only shapes are computed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.models.checkpoint import Checkpoint, open_checkpoint
from services.models.hf import transformers
from services.models.image_sizes import UnsupportedSize
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


def prepare(processor: Any, clip: Clip, sampling: Sampling, **settings: Any) -> tuple[Any, str]:
    """What the processor makes of a clip whose frames it samples itself, and what it writes for it."""
    blank = torch.empty((clip.frames, 3, clip.height, clip.width), dtype=torch.uint8, device="meta")
    facts = dict(fps=clip.fps, total_num_frames=clip.frames, duration=clip.frames / clip.fps)
    facts["frames_indices"] = list(range(clip.frames))
    chosen = processor._merge_kwargs()
    own = dict(video_metadata=[facts], do_sample_frames=sampling != ALL_FRAMES, return_metadata=True)
    chosen["videos_kwargs"] |= (
        own | {"fps": sampling.fps, "num_frames": sampling.frames, "input_data_format": "channels_first"} | settings
    )
    flat = {} if "Omni" in type(processor).__name__ else chosen.pop("videos_kwargs")
    inputs, [text] = processor._process_videos([blank], **(flat or chosen))
    return inputs, text


def written(checkpoint: Checkpoint, plan: ItemPlan) -> str:
    token = PromptLayout(checkpoint).tokenizer.fast.id_to_token(checkpoint.placeholder_id(Modality.VIDEO))
    return "".join(part if isinstance(part, str) else token * part for part in plan.spelling)


def same_frames(family: str, clip: Clip, ours: tuple[int, ...], theirs: list[int]) -> bool:
    """Whether the frames are the same; where they are not, that is for the rounding of ``torch.arange``.

    Its single precision may take a neighbour of the frame where the exact place is a whole number but for rounding, and may
    add one at the end of the video or even behind it, with which the processor would fail.
    """
    if list(ours) == theirs:
        return True
    assert family not in ("qwen3_vl", "llava_onevision"), clip
    assert theirs[len(ours) :] in ([], [clip.frames - 1], [clip.frames]), (clip, ours, theirs)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        exact = (i + (0.5 if family == "internvl" else 0)) * clip.frames / len(ours)
        assert one == other or (abs(one - other) == 1 and abs(exact - round(exact)) < 1e-2), (clip, ours, theirs)
    return False


def check(family: str, checkpoint: Checkpoint, processor: Any, clip: Clip, sampling: Sampling, **settings: Any) -> None:
    inputs, text = prepare(processor, clip, sampling, **settings)
    [plan] = checkpoint.plan([clip], sampling)
    theirs = [int(i) for i in inputs["video_metadata"][0].frames_indices]
    if family == "qwen3_vl":
        theirs = theirs[: len(plan.frames)]  # it fills the last pair up in place
    if not same_frames(family, clip, plan.frames, theirs):
        return
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
    for clip in clips(family, 20, 40):
        check(family, checkpoint, processor, clip, ALL_FRAMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_at_a_rate(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    for clip in clips(f"rate {family}", 12, 2000):
        for fps in (0.5, 1.0, 2.0):
            wanted = clip.frames / clip.fps * fps
            if clip.frames < 4 or not 1 <= wanted <= clip.frames:
                continue  # the processors divide by zero or refuse
            check(family, checkpoint, processor, clip, Sampling(fps=fps))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_of_frames(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    dice = random.Random(family)
    for clip in clips(f"number {family}", 15, 3000):
        count = dice.randint(2, 40)
        if count + 1 < clip.frames:
            check(family, checkpoint, processor, clip, Sampling(frames=count))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_indices_of_thousands_of_lengths(family: str, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    dice, same = random.Random(f"indices {family}"), 0
    for _ in range(600):
        clip = Clip(64, 64, dice.randint(40, 100_000), dice.choice(RATES))
        sampling = Sampling(frames=dice.randint(2, 38)) if dice.random() < 0.5 else Sampling(fps=dice.choice([0.1, 0.25, 0.5]))
        facts = transformers.video_utils.VideoMetadata(total_num_frames=clip.frames, fps=clip.fps)
        try:
            indices = processor.video_processor.sample_frames(facts, fps=sampling.fps, num_frames=sampling.frames)
        except (ValueError, ZeroDivisionError):
            continue  # too short for this rate
        [plan] = checkpoint.plan([clip], sampling)
        same += same_frames(family, clip, plan.frames, indices.tolist())
    assert same > 400


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [ALL_FRAMES, Sampling(fps=2.0), Sampling(fps=0.01), Sampling(frames=8), None])
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_short_clips_are_never_empty(family: str, sampling: Sampling | None, frames: int, checkpoint_dir: Directory) -> None:
    """Where the processors divide by zero or refuse, all frames are taken, or at least one."""
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    [plan] = checkpoint.plan([Clip(320, 240, frames, 25.0)], sampling)
    assert plan.rows > 0 and 1 <= len(plan.frames) <= max(frames, 8) and set(plan.frames) <= set(range(frames))
    assert plan.rows == sum(part for part in plan.spelling if isinstance(part, int))


def test_frames_of_an_uneven_rate_keep_their_own_times(checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen3_vl")))
    times = (0.0, 0.1, 0.2, 1.0, 2.0, 3.0)
    [plan] = checkpoint.plan([Clip(64, 64, 6, 2.0, times)], ALL_FRAMES)
    assert plan.frames == (0, 1, 2, 3, 4, 5) and plan.times == times
    [plan] = checkpoint.plan([Clip(64, 64, 6, 2.0, times)], Sampling(frames=3))
    assert plan.frames == (0, 3, 4) and plan.times == (0.0, 1.0, 2.0)  # even ones are at 0, 1 and 2.5 s
    assert str(plan.runs[0]).startswith("<0.5 seconds>")
    even = Clip(64, 64, 300, 29.97, tuple(i / 29.97 for i in range(300)))
    [known], [assumed] = (checkpoint.plan([clip], Sampling(fps=2.0)) for clip in (even, dataclasses.replace(even, times=())))
    assert known == assumed


def test_the_checkpoint_says_which_frames_by_default(checkpoint_dir: Directory) -> None:
    """Its video processor's own rate or number first, else the family's."""
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_vl")))
    assert checkpoint.sampling == Sampling(fps=2.0)
    for video, expected in [({"fps": 3}, Sampling(fps=3.0)), ({"num_frames": 16}, Sampling(frames=16))]:
        settings = {**checkpoint.settings, Modality.VIDEO: {**checkpoint.settings[Modality.VIDEO], **video}}
        assert dataclasses.replace(checkpoint, settings=settings).sampling == expected


def test_capped_frames_equal_the_processors(checkpoint_dir: Directory) -> None:
    for family in ("qwen2_vl", "qwen3_vl"):
        checkpoint, processor = load(checkpoint_dir(family))
        own = {"cap_pixels_per_frame": True, "max_video_tokens": 100}
        settings = {**checkpoint.settings, Modality.VIDEO: {**checkpoint.settings[Modality.VIDEO], **own}}
        capped = dataclasses.replace(checkpoint, settings=settings)
        for name, value in own.items():
            setattr(processor.video_processor, name, value)
        lower = 0
        for clip in clips(f"cap {family}", 20, 60):
            check(family, capped, processor, clip, ALL_FRAMES)
            lower += capped.plan([clip], ALL_FRAMES)[0].rows < checkpoint.plan([clip], ALL_FRAMES)[0].rows
        assert lower, family


@pytest.mark.parametrize("family", FAMILIES)
def test_strips_are_refused(family: str, checkpoint_dir: Directory) -> None:
    with pytest.raises(UnsupportedSize, match="one side may be at most 200 times"):
        open_checkpoint(str(checkpoint_dir(family))).plan([Clip(9000, 40, 8, 25.0)])
