"""Token arithmetic of recordings, one function a scheme. Torch-free; golden tests hold it equal to the processors."""

from __future__ import annotations

import math
from collections.abc import Callable

from services.models.image_sizes import Settings, UnsupportedSize
from services.models.media import Grid, ItemPlan, Modality

RATE = 16000  # samples a second that all of these models hear
AudioScheme = Callable[[int, Settings, Settings], ItemPlan]  # samples at RATE, config, feature extractor


def qwen2_audio_frames(samples: int, config: Settings, processor: Settings) -> ItemPlan:
    """Qwen2-Audio and Qwen2.5-Omni: mel frames of 10 ms, halved by a convolution and halved again by pooling.

    Source: Chu et al., "Qwen2-Audio" (arXiv 2407.10759); ``Qwen2AudioProcessor._process_audio``,
    ``Qwen2_5OmniProcessor._process_audio`` and ``WhisperFeatureExtractor`` of transformers 5.24, which cuts off what is longer
    than its chunk (30 and 300 seconds): ``samples`` of the plan says how much is heard.

    Raises:
        UnsupportedSize: too short to become a single row.
    """
    longest = int(processor.get("chunk_length", 30)) * int(processor.get("sampling_rate", RATE))
    heard = min(samples, longest)
    frames = math.ceil(heard / int(processor.get("hop_length", 160)))
    positions = (frames - 1) // 2 + 1
    rows = (positions - 2) // 2 + 1
    if rows < 1:
        raise UnsupportedSize(f"{samples} samples at {RATE} a second are too short: at least 321 are needed")
    return ItemPlan(Modality.AUDIO, rows, Grid(1, 1, rows), positions, samples=heard)


def voxtral_windows(samples: int, config: Settings, processor: Settings) -> ItemPlan:
    """Voxtral: every started window of 30 seconds has the same number of rows.

    Source: "Voxtral" (arXiv 2507.13264); ``VoxtralProcessor._retrieve_input_features`` and
    ``VoxtralForConditionalGeneration.get_audio_features`` of transformers 5.24.

    Raises:
        UnsupportedSize: there is no sample.
    """
    if samples < 1:
        raise UnsupportedSize("the recording has no samples")
    audio = config["audio_config"]
    window = int(processor.get("chunk_length", 30)) * int(processor.get("sampling_rate", RATE))
    windows = math.ceil(samples / window)
    positions = windows * int(audio["max_source_positions"])
    rows = positions * int(audio["hidden_size"]) // int(audio["intermediate_size"])
    return ItemPlan(Modality.AUDIO, rows, Grid(1, 1, rows), positions, tiles=windows, samples=samples)
