"""What the towers are given, against the stock processors: pictures and frames to the bit, sounds to within rounding."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from services.encoder import pixel_kernel
from services.encoder.families import schemes_of
from services.encoder.mel import log_mel
from services.encoder.pixels import copying_nothing, view
from services.encoder.preprocess import Preprocessor
from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.media import ALL_FRAMES, Clip, Grid, ItemPlan, Look, Modality, Picture, Recording
from services.models.registry import FAMILIES
from services.models.video_plans import OMNI_PIXELS

SIZES = [(640, 480), (37, 411), (900, 33), (20, 24), (333, 334), (1, 1)]
LARGE = [(1500, 1125), (480, 1013), (130, 97)]  # for settings of the size that is published
IMAGES = [f.model_type for f in FAMILIES.values() if f.image]
VIDEOS = [f.model_type for f in FAMILIES.values() if f.video]
FORCED = {"internvl": {"crop_to_patches": True}, "gemma3": {"do_pan_and_scan": False}, "llava_next": {"do_pad": True}}
Directory = Callable[[str], Path]


@pytest.fixture(params=["compiled", "torch"])
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of making numbers of bytes."""
    if request.param == "torch":
        monkeypatch.setattr(pixel_kernel, "load", lambda: None)
    elif pixel_kernel.load() is None:
        pytest.skip("this machine has no C++ compiler")


def photo(width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3] as a JPEG decoder gives it: soft shapes, hard edges, noise, the artefacts of its blocks."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (max(1, height // 40), max(1, width // 40), 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    pixels[height // 3 : height // 2, width // 4 :: 7] = rng.choice([0, 255])
    pixels += rng.normal(0, 12, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return np.array(Image.open(out))


def same(made: Any, stock: Any) -> None:
    """Every tensor that the towers get is the stock processor's, to the bit; only nesting may differ."""
    for name, tensor in made.items():
        if name not in ("causal", "batch_num_images"):
            assert torch.equal(tensor.float().flatten(), stock[name].float().flatten()), name


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("family", IMAGES)
def test_pictures(family: str, checkpoint_dir: Directory) -> None:
    """With the checkpoint's small settings, and with those that the class of its processor has by default."""
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    own = Preprocessor(checkpoint, [Modality.IMAGE])
    stock = transformers.AutoImageProcessor.from_pretrained(checkpoint.path)
    tried = 0
    for width, height in SIZES:
        try:
            plan = checkpoint.plan_image(width, height)
        except ValueError:
            continue  # this family does not take such a picture
        pixels = photo(width, height)
        prepared = own(pixels, plan)
        same(prepared.inputs, stock(images=[Image.fromarray(pixels)], return_tensors="pt", **FORCED.get(family, {})))
        assert prepared.grid == plan.grid
        tried += 1
    assert tried >= 4
    usual = type(stock)()
    prepare = schemes_of(family)[Modality.IMAGE].prepare
    for width, height in LARGE:
        pixels, several = photo(width, height), ItemPlan(Modality.IMAGE, 1, Grid(1, 1, 1), 1, tiles=2)
        made = prepare(copying_nothing(type(stock)()), view(pixels), several)
        same(made, usual(images=[Image.fromarray(pixels)], return_tensors="pt", **FORCED.get(family, {})))


def bounds(stock: Any, look: Look) -> dict[str, Any]:
    low, high = look.min_pixels or stock.size["shortest_edge"], look.max_pixels or stock.size["longest_edge"]
    return {"size": {"shortest_edge": min(low, high), "longest_edge": high}}


LOW: dict[str, dict[str, Any]] = {  # what the stock processor is told for a picture at low detail
    **{family: {"size": {"shortest_edge": 56 * 56, "longest_edge": 512 * 512}} for family in ("qwen2_vl", "qwen2_5_vl")},
    "qwen3_vl": {"size": {"shortest_edge": 256 * 256, "longest_edge": 512 * 512}},
    "llava_next": {"image_grid_pinpoints": [[112, 112]]},
    "internvl": {"max_patches": 1},
    "smolvlm": {"do_image_splitting": False},
    "idefics3": {"do_image_splitting": False},
    "gemma3": {"do_pan_and_scan": False},
    "gemma4": {"max_soft_tokens": 70},
    "phi4_multimodal": {"dynamic_hd": 1},
}


@pytest.mark.parametrize("family", LOW)
def test_pictures_at_low_detail(family: str, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    own = Preprocessor(checkpoint, [Modality.IMAGE])
    stock = transformers.AutoImageProcessor.from_pretrained(checkpoint.path)
    for width, height in LARGE:
        pixels = photo(width, height)
        (plan,) = checkpoint.plan([Picture(width, height, Look(low=True))])
        prepared = own(pixels, plan)
        settings = FORCED.get(family, {}) | LOW[family]
        same(
            {name: tensor for name, tensor in prepared.inputs.items() if name != "one_tile"},
            stock(images=[Image.fromarray(pixels)], return_tensors="pt", **settings),
        )
        assert prepared.grid == plan.grid


@pytest.mark.parametrize("look", [Look(max_pixels=90_000), Look(min_pixels=900_000), Look(min_pixels=5000, max_pixels=9000)])
@pytest.mark.parametrize("family", [family for family in IMAGES if FAMILIES[family].any_size])
def test_bounds_of_pixels(family: str, look: Look, checkpoint_dir: Directory) -> None:
    """Of a picture, and of each frame of a video."""
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    own = Preprocessor(checkpoint, [Modality.IMAGE, Modality.VIDEO])
    picture, video = (
        kind.from_pretrained(checkpoint.path) for kind in (transformers.AutoImageProcessor, transformers.AutoVideoProcessor)
    )
    pixels = photo(640, 480)
    (plan,) = checkpoint.plan([Picture(640, 480, look)])
    prepared = own(pixels, plan)
    same(prepared.inputs, picture(images=[Image.fromarray(pixels)], return_tensors="pt", **bounds(picture, look)))
    assert prepared.grid == plan.grid
    frames = np.stack([photo(320, 240, index) for index in range(4)])
    (plan,) = checkpoint.plan([Clip(320, 240, 4, 2.0, look=look)], ALL_FRAMES)
    prepared = own(frames, plan)
    assert prepared.grid == plan.grid and plan.look == look
    together = 4 if family == "qwen3_vl" else 1
    if look.max_pixels:
        low = (look.min_pixels or 0) * together or video.size["shortest_edge"]
        high = look.max_pixels * together
        size = {"shortest_edge": min(low, high), "longest_edge": high}
        if family != "qwen2_5_omni_thinker" or look.min_pixels:
            theirs = video(
                videos=[frames], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt", size=size
            )
            same(prepared.inputs, theirs)


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize("family", VIDEOS)
def test_videos(family: str, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    own = Preprocessor(checkpoint, [Modality.VIDEO])
    stock = transformers.AutoVideoProcessor.from_pretrained(checkpoint.path)
    settings = {"size": OMNI_PIXELS} if family == "qwen2_5_omni_thinker" else {}
    for width, height, count in [(64, 90, 2), (240, 136, 5), (51, 77, 4)]:
        (plan,) = checkpoint.plan([Clip(width, height, count, 2.0)], ALL_FRAMES)
        frames = np.stack([photo(width, height, index) for index in range(count)])[list(plan.frames)]
        prepared = own(frames, plan)
        theirs = stock(
            videos=[frames], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt", **settings
        )
        made = {"pixel_values_videos" if name == "pixel_values" else name: made for name, made in prepared.inputs.items()}
        same(made, theirs)
        assert prepared.grid == plan.grid


def test_pictures_stay_where_they_are() -> None:
    pixels = photo(40, 30)
    seen = view(pixels)
    assert seen.shape == (3, 30, 40) and seen.data_ptr() == pixels.ctypes.data
    processor = copying_nothing(transformers.LlavaImageProcessor())
    assert processor.process_image(seen).data_ptr() == pixels.ctypes.data


@pytest.mark.usefixtures("numbers")
def test_a_setting_that_is_turned_off_stays_off() -> None:
    pixels, plan = photo(56, 84), ItemPlan(Modality.IMAGE, 1, Grid(1, 1, 1), 1)
    for family, cls in (("llava", transformers.LlavaImageProcessor), ("qwen2_vl", transformers.Qwen2VLImageProcessor)):
        for off in ("do_normalize", "do_rescale", "do_resize"):
            stock, own = cls(**{off: False}), copying_nothing(cls(**{off: False}))
            made = schemes_of(family)[Modality.IMAGE].prepare(own, view(pixels), plan)
            theirs = stock(images=[Image.fromarray(pixels)], return_tensors="pt")
            assert all(torch.allclose(made[name].float(), theirs[name].float(), atol=1e-6) for name in made), (family, off)


@pytest.mark.parametrize("settings", [{"do_pad": True}, {"do_center_crop": False}, {"size": {"height": 50, "width": 70}}])
def test_settings_of_llava(settings: dict[str, Any]) -> None:
    cls, prepare = transformers.LlavaImageProcessor, schemes_of("llava")[Modality.IMAGE].prepare
    for width, height in [(90, 200), (640, 480), (333, 334)]:
        pixels = photo(width, height)
        made = prepare(copying_nothing(cls(**settings)), view(pixels), ItemPlan(Modality.IMAGE, 1, Grid(1, 1, 1), 1))
        same(made, cls(**settings)(images=[Image.fromarray(pixels)], return_tensors="pt"))


@pytest.mark.parametrize("count", [1, 100, 161, 15999, 16000, 479000, 479999, 480000])
def test_sounds(count: int) -> None:
    """From one sample to a full window, where the end is mirrored and not silent."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    time = np.arange(count) / 16000
    noise = np.random.default_rng(1).normal(0, 0.02, count)
    samples = (noise + 0.3 * np.sin(2 * np.pi * 440 * time * (1 + time / 60))).astype(np.float32)
    theirs = extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"][0]
    assert float((log_mel(extractor, samples, 480000) - theirs).abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_thinker", "voxtral"])
def test_sounds_of_families(family: str, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    own = Preprocessor(checkpoint, [Modality.AUDIO])
    stock = transformers.AutoFeatureExtractor.from_pretrained(checkpoint.path)
    for seconds in (0.3, 2.71, 31.0):
        samples = np.random.default_rng(2).normal(0, 0.1, round(seconds * 16000)).astype(np.float32)
        (plan,) = checkpoint.plan([Recording(len(samples))])
        made = own(samples, plan).inputs
        whole = -(-len(samples) // stock.n_samples) * stock.n_samples if family == "voxtral" else None
        theirs = stock(samples, sampling_rate=16000, return_attention_mask=True, max_length=whole, return_tensors="pt")
        mel = theirs["input_features"][0]  # [bins, frames]
        match family:
            case "qwen2_audio":
                assert torch.equal(made["feature_attention_mask"], theirs["attention_mask"])
                ours = made["input_features"][0]
            case "voxtral":
                ours = made["input_features"].transpose(0, 1).flatten(1)
            case _:
                assert int(made["counts"]) == int(theirs["attention_mask"].sum())
                ours, mel = made["frames"].T, mel[:, : int(made["counts"])]
        assert ours.shape == mel.shape and float((ours - mel).abs().max()) < 1e-4


def test_silence_is_finite() -> None:
    extractor = transformers.WhisperFeatureExtractor()
    mel = log_mel(extractor, np.zeros(16000, np.float32), 480000)
    assert mel.shape == (80, 3000) and float(mel.min()) == float(mel.max()) == -1.5
