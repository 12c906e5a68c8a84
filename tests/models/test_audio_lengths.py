"""What recordings cost, held equal to what the feature extractors make of recordings of every length."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.models.checkpoint import open_checkpoint
from services.models.hf import transformers
from services.models.image_sizes import UnsupportedSize
from services.models.media import Picture, Recording

Directory = Callable[[str], Path]
EXACT = [321, 480, 481, 16_000, 479_999, 480_000, 480_001, 500_000, 640_000]


def lengths(seed: str, count: int, longest: int) -> list[int]:
    dice = random.Random(seed)
    return [*EXACT, longest, *(max(321, round(longest ** dice.uniform(0.4, 1))) for _ in range(count))]


@pytest.mark.parametrize(("family", "longest"), [("qwen2_audio", 600_000), ("qwen2_5_omni_thinker", 5_000_000)])
def test_rows_equal_the_processors(family: str, longest: int, checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_dir(family)
    checkpoint, processor = open_checkpoint(str(path)), transformers.AutoProcessor.from_pretrained(path)
    extractor = processor.feature_extractor
    monkeypatch.setattr(extractor, "_torch_extract_fbank_features", lambda samples, device: np.zeros((len(samples), 1, 1)))
    settings = processor._merge_kwargs()["audio_kwargs"]
    for samples in lengths(family, 5, longest):
        inputs, [text] = processor._process_audio([np.zeros(samples, np.float32)], **settings)
        [plan] = checkpoint.plan([Recording(samples)])
        assert plan.rows == text.count(processor.audio_token) == int(inputs["num_audio_tokens"][0]), samples
        assert plan.samples == min(samples, extractor.n_samples)
        frames = int(inputs["feature_attention_mask"].sum())
        assert plan.patches == (frames - 1) // 2 + 1


def test_omni_rows_equal_the_processors_own_count(checkpoint_dir: Directory) -> None:
    path = checkpoint_dir("qwen2_5_omni_thinker")
    checkpoint, processor = open_checkpoint(str(path)), transformers.AutoProcessor.from_pretrained(path)
    some = lengths("omni", 5000, 6_000_000)
    counts = processor._get_num_multimodal_tokens(audio_lengths=some).num_audio_tokens
    assert [plan.rows for plan in checkpoint.plan([Recording(samples) for samples in some])] == counts


def test_voxtral_rows_equal_the_towers(checkpoint_dir: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_dir("voxtral")
    checkpoint, processor = open_checkpoint(str(path)), transformers.AutoProcessor.from_pretrained(path)
    model = transformers.VoxtralForConditionalGeneration.from_pretrained(path).eval()
    extractor = processor.feature_extractor

    def mel(samples: np.ndarray, device: str) -> np.ndarray:
        return np.zeros((len(samples), 128, samples.shape[1] // extractor.hop_length), np.float32)

    monkeypatch.setattr(extractor, "_torch_extract_fbank_features", mel)
    settings = processor._merge_kwargs()["audio_kwargs"]
    positions = settings.pop("max_source_positions")
    for samples in [1, *lengths("voxtral", 8, 3_000_000)]:
        windows = processor._retrieve_input_features([np.zeros(samples, np.float32)], positions, **settings)
        [plan] = checkpoint.plan([Recording(samples)])
        assert (plan.tiles, plan.samples) == (len(windows), samples), samples
        if samples <= 480_001:
            with torch.no_grad():
                rows = model.base_model.get_audio_features(windows, return_dict=True).pooler_output
            assert plan.rows == len(rows), samples


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_thinker"])
@pytest.mark.parametrize("samples", [0, 1, 320])
def test_too_short_recordings_are_refused(family: str, samples: int, checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir(family)))
    with pytest.raises(UnsupportedSize, match=f"{samples} samples .* at least 321") as caught:
        checkpoint.plan([Recording(9000), Recording(samples)])
    assert caught.value.item == 1
    assert checkpoint.plan([Recording(321)])[0].rows == 1


def test_plans_keep_the_order_of_the_media(checkpoint_dir: Directory) -> None:
    checkpoint = open_checkpoint(str(checkpoint_dir("qwen2_5_omni_thinker")))
    plans = checkpoint.plan([Recording(9000), Picture(300, 200), Recording(90_000), Picture(60, 60)])
    assert [plan.modality.word for plan in plans] == ["audio", "image", "audio", "image"]
    assert plans[0].rows < plans[2].rows and plans[1].rows > plans[3].rows


def test_voxtral_refuses_nothing_to_hear(checkpoint_dir: Directory) -> None:
    with pytest.raises(UnsupportedSize, match="no samples"):
        open_checkpoint(str(checkpoint_dir("voxtral"))).plan([Recording(0)])
