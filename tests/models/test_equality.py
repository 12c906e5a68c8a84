"""Equality in bulk, without tolerance: plans against the pinned processors, with every detail and with bounds of pixels.

What stands for the processor: it runs as a whole on pictures without memory (its grids, its tiles, the text that it writes), but
for Phi-4's, whose resizing is left out, as its mask tells all. The whole of it, down to ``input_ids``, runs on a random subset.
A few dozen shapes a family run with every change; ``-m slow`` runs thousands.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from services.models.audio_lengths import RATE
from services.models.checkpoint import Checkpoint
from services.models.hf import transformers
from services.models.image_sizes import MAX_ASPECT, UnsupportedSize
from services.models.layout import PromptLayout, Turn
from services.models.media import ALL_FRAMES, AS_SET, Clip, Grid, ItemPlan, Look, Modality, Picture, Recording, Sampling
from services.models.registry import FAMILIES
from tests.looks import switched
from tests.models import test_video_plans as videos
from tests.models.processors import Size, load, prepare, spelled
from tests.reference import Ask, Oracle

Directory = Callable[[str], Path]
LONGEST = 4096
IMAGES = [f.model_type for f in FAMILIES.values() if f.image]
AUDIO = [f.model_type for f in FAMILIES.values() if f.audio]
VIDEOS = [f.model_type for f in FAMILIES.values() if f.video]
LOW = Look(low=True)
few = pytest.param(1, id="few")
bulk = pytest.param(85, id="bulk", marks=pytest.mark.slow)  # over 2,000 pictures that are taken, 500 recordings


def sizes(seed: str, count: int) -> list[Size]:
    """Half of them with sides of every length alike, half with small ones as often as large ones."""
    dice = random.Random(seed)
    drawn = [(dice.randint(1, LONGEST), dice.randint(1, LONGEST)) for _ in range(count // 2)]
    return drawn + [(round(LONGEST ** dice.random()), round(LONGEST ** dice.random())) for _ in range(count - count // 2)]


def made(processor: Any, family: str, size: Size, look: Look) -> tuple[Any, str]:
    """The processor's answer; LLaVA-OneVision's switch is a picture beside, which makes each a single tile."""
    beside = [(1, 1)] if family == "llava_onevision" and look.low else []
    with switched(processor, family, look) as settings:
        inputs, texts = prepare(processor, [size, *beside], **settings)
    return inputs, texts[0]


def check_picture(checkpoint: Checkpoint, processor: Any, token: str, size: Size, look: Look) -> ItemPlan:
    family = checkpoint.family.model_type
    [plan] = checkpoint.plan([Picture(*size, look)])
    inputs, text = made(processor, family, size, look)
    assert "".join(part if isinstance(part, str) else token * part for part in plan.spelling) == text, (size, look)
    match family:
        case "mllama":
            assert plan.tiles == inputs["num_tiles"][0][0], (size, look)
        case "llava_next" | "llava_onevision" | "smolvlm" | "idefics3":
            assert plan.tiles == len(inputs["pixel_values"][0]), (size, look)
        case _ if "image_grid_thw" in inputs:
            assert plan.grid == Grid(*inputs["image_grid_thw"][0].tolist()), (size, look)
            assert plan.patches == len(inputs["pixel_values"])
        case _:
            assert plan.tiles == len(inputs["pixel_values"]), (size, look)
    return plan


def looks(family: str, dice: random.Random) -> list[Look]:
    """As the files say (auto and high), low, and where callers may bound pixels, bounds."""
    if not FAMILIES[family].any_size:
        return [AS_SET, LOW]
    low, high = sorted(round(2 ** dice.uniform(6, 24)) for _ in range(2))
    bounds = dice.choice([{"min_pixels": low, "max_pixels": high}, {"max_pixels": high}, {"min_pixels": min(low, 3000)}])
    return [AS_SET, LOW, Look(**bounds), Look(low=True, max_pixels=high)]


def refused(checkpoint: Checkpoint, size: Size) -> bool:
    """Whether it is a strip, which every family's plan refuses."""
    if max(size) > MAX_ASPECT * min(size):
        with pytest.raises(UnsupportedSize, match="200"):
            checkpoint.plan_image(*size)
        return True
    return False


@pytest.mark.parametrize("times", [few, bulk])
@pytest.mark.parametrize("family", [family for family in IMAGES if family != "phi4_multimodal"])
def test_pictures(family: str, times: int, checkpoint_dir: Directory) -> None:
    checkpoint, processor = load(checkpoint_dir(family))
    token = PromptLayout(checkpoint).tokenizer.fast.id_to_token(checkpoint.placeholder_id(Modality.IMAGE))
    dice, checked, cheaper = random.Random(family), 0, 0
    for size in sizes(f"bulk {family}", 30 * times):
        if refused(checkpoint, size):
            continue
        rows = []
        for look in looks(family, dice):
            try:
                rows.append(check_picture(checkpoint, processor, token, size, look).rows)
            except UnsupportedSize:  # a decision of ours: no resolution keeps a pixel of it
                tile = checkpoint.settings[Modality.IMAGE]["crop_size"]["height"]
                assert family in ("llava_next", "llava_onevision") and max(size) > tile * min(size)
                break
        else:
            checked += 1
            cheaper += rows[1] < rows[0]
    assert checked >= 24 * times
    assert (cheaper > 0) == (family not in ("llava", "paligemma", "mllama", "gemma3"))


@pytest.mark.parametrize("times", [few, bulk])
def test_pictures_of_phi4(times: int, checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its resizing left out, so that pictures of any size cost nothing: the mask tells all."""
    checkpoint, processor = load(checkpoint_dir("phi4_multimodal"))
    module = transformers.models.phi4_multimodal.image_processing_phi4_multimodal
    monkeypatch.setattr(module, "tvF", SimpleNamespace(resize=lambda image, size: image, pad=lambda image, *a, **k: image))
    checked = cheaper = 0
    for width, height in sizes("bulk phi4", 36 * times):
        if refused(checkpoint, (width, height)):
            continue
        blank, rows = torch.zeros((3, 1, 1)).expand(3, height, width), []
        for look, most in ((AS_SET, processor.image_processor.dynamic_hd), (LOW, 1)):
            try:
                _, mask = processor.image_processor.dynamic_preprocess(blank, 448, 14, 32, max_num=most)
            except ValueError:
                with pytest.raises(UnsupportedSize, match="must keep 10"):
                    checkpoint.plan([Picture(width, height, look)])
                continue
            [plan] = checkpoint.plan([Picture(width, height, look)])
            kept = mask[::2, ::2]
            assert plan.rows == 256 + 1 + int(kept.sum()) + int(kept[:, 0].sum()) + 16, (width, height, look)
            assert plan.tiles == 1 + mask.numel() // 32**2
            rows.append(plan.rows)
        checked += len(rows) == 2
        cheaper += len(rows) == 2 and rows[1] < rows[0]
    assert checked >= 24 * times and cheaper


@pytest.mark.parametrize("times", [few, bulk])
@pytest.mark.parametrize("family", IMAGES)
def test_whole_prompts_with_pictures(family: str, times: int, checkpoint_dir: Directory) -> None:
    """``input_ids`` of the processor itself, from pixels; some with a side of thousands."""
    path = checkpoint_dir(family)
    if family == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor requires it")
    oracle, (checkpoint, _) = Oracle(path), load(path)
    layout, dice = PromptLayout(checkpoint), random.Random(f"whole {family}")
    small = [(dice.randint(9, 500), dice.randint(9, 500)) for _ in range(2 * -(-times // 5))]
    large = [(dice.randint(9, LONGEST), dice.randint(9, 1500)) for _ in range(-(-times // 10))]
    for size in [*small, *large]:
        if max(size) > 40 * min(size):
            continue
        for look in [AS_SET] if family == "llava_onevision" else [AS_SET, LOW]:
            plans = checkpoint.plan([Picture(*size, look)])
            ours = layout.lay_out([Turn("user", (plans[0], "what is it?"))])
            file = io.BytesIO()
            Image.new("RGB", size, (9, 99, 200)).save(file, "PNG")
            theirs = oracle.inputs(Ask([("user", [file.getvalue(), "what is it?"])], low=look.low))
            assert ours.token_ids == theirs["input_ids"][0].tolist(), (size, look)


def lengths(seed: str, count: int, longest: int) -> list[int]:
    dice = random.Random(seed)
    edges = [321, 480, 481, *(30 * RATE * n + by for n in (1, 2) for by in (-1, 0, 1))]
    return [*edges, *(max(321, round(longest ** dice.uniform(0.45, 1))) for _ in range(count - len(edges)))]


@pytest.mark.parametrize("times", [few, bulk])
@pytest.mark.parametrize("family", AUDIO)
def test_recordings(family: str, times: int, checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor runs on silence of each length, but for its spectra, of which only the number counts."""
    checkpoint, processor = load(checkpoint_dir(family))
    extractor = processor.feature_extractor
    monkeypatch.setattr(extractor, "_torch_extract_fbank_features", lambda samples, device: np.zeros(
        (len(samples), extractor.feature_size, samples.shape[1] // extractor.hop_length), np.float32))  # fmt: skip
    settings = processor._merge_kwargs()["audio_kwargs"]
    positions = settings.pop("max_source_positions", None)
    longest = 640_000 if family == "qwen2_audio" else 5_000_000
    for samples in lengths(f"bulk {family}", 6 * times + 9, longest):
        silence = np.zeros(samples, np.float32)
        [plan] = checkpoint.plan([Recording(samples)])
        if family == "voxtral":
            windows = processor._retrieve_input_features([silence], positions, **settings)
            assert (plan.tiles, plan.samples) == (len(windows), samples)
            assert plan.rows == len(windows) * plan.rows // plan.tiles
            continue
        inputs, [text] = processor._process_audio([silence], **settings)
        assert spelled(checkpoint, plan) == text, samples
        assert plan.rows == int(inputs["num_audio_tokens"][0]), samples
        assert plan.samples == min(samples, extractor.n_samples)


@pytest.mark.parametrize("times", [pytest.param(1, id="few"), pytest.param(25, id="bulk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", VIDEOS)
def test_clips(family: str, times: int, checkpoint_dir: Directory) -> None:
    """Every way of sampling; of families that take any size also with bounds of a frame's pixels."""
    checkpoint, processor = videos.load(checkpoint_dir(family))
    dice = random.Random(f"clips {family}")
    checked = 0
    for clip in videos.clips(f"bulk {family}", 12 * times, 1500):
        samplings = [Sampling(fps=dice.choice([0.5, 1.0, 2.0])), Sampling(frames=dice.randint(2, 40))]
        samplings += [ALL_FRAMES] if clip.frames <= 60 else []
        for sampling in samplings:
            wanted = sampling.frames or clip.frames / clip.fps * (sampling.fps or clip.fps)
            if clip.frames < 4 or not 1 <= wanted < clip.frames + (sampling == ALL_FRAMES):
                continue  # the processors divide by zero or refuse
            videos.check(family, checkpoint, processor, clip, sampling)
            checked += 1
    assert checked > 8 * times


def bounded_clips(seed: str, count: int) -> Iterator[Clip]:
    dice = random.Random(seed)
    for clip in videos.clips(seed, count, 40):
        low, high = sorted(round(2 ** dice.uniform(10, 19)) for _ in range(2))
        bounds = dice.choice([{"max_pixels": high}, {"min_pixels": low, "max_pixels": high}])
        yield Clip(clip.width, clip.height, clip.frames, clip.fps, look=Look(**bounds))


@pytest.mark.parametrize("family", [family for family in VIDEOS if FAMILIES[family].any_size])
def test_bounds_of_a_frame(family: str, checkpoint_dir: Directory) -> None:
    """Where the processor's bounds are of all frames together, they are as many times larger."""
    checkpoint, processor = videos.load(checkpoint_dir(family))
    own = dict(processor.video_processor.size)
    if family == "qwen2_5_omni_thinker":
        own = dict(processor._merge_kwargs()["videos_kwargs"]["size"])
    for clip in bounded_clips(f"bounds {family}", 12):
        frames = max(clip.frames, 2) if family == "qwen3_vl" else 1
        high = (clip.look.max_pixels or 0) * frames
        low = clip.look.min_pixels * frames if clip.look.min_pixels else own["shortest_edge"]
        size = {"shortest_edge": min(low, high), "longest_edge": high}
        videos.check(family, checkpoint, processor, clip, ALL_FRAMES, size=size)


def test_a_look_that_makes_no_difference_is_none(checkpoint_dir: Directory) -> None:
    """So that what is kept of the item is found again."""
    checkpoint, _ = load(checkpoint_dir("llava"))
    [plain, low, bounded] = checkpoint.plan([Picture(60, 40), Picture(60, 40, LOW), Picture(60, 40, Look(max_pixels=9))])
    assert plain == low == bounded and plain.look == AS_SET


def test_low_detail_beside_others(checkpoint_dir: Directory) -> None:
    """Each picture of a request is looked at as its part says."""
    for family in ("qwen2_vl", "llava_next", "internvl", "idefics3", "phi4_multimodal"):
        checkpoint, _ = load(checkpoint_dir(family))
        big = Picture(1200, 900)
        first, low, last = checkpoint.plan([big, Picture(1200, 900, LOW), big])
        assert first.rows == last.rows == checkpoint.plan_image(1200, 900).rows > low.rows, family
        assert (first.look, low.look) == (AS_SET, LOW)
