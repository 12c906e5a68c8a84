"""How each family prepares and encodes recordings. A recording is one channel of float32 samples at the model's own rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.encoder.features import FIRST_EXTENT, Cut, Inputs, Levels, Scheme
from services.encoder.mel import log_mel
from services.models.hf import masking_utils
from services.models.media import ItemPlan


def _frames_of(processor: Any, samples: np.ndarray) -> int:
    return -(-len(samples) // int(processor.hop_length))


def _qwen2_audio(processor: Any, samples: np.ndarray, plan: ItemPlan) -> Inputs:
    """Mel frames, padded with silence to the longest that the model hears, and which of them are sound."""
    heard = samples[: min(plan.samples, processor.n_samples)]
    mel = log_mel(processor, heard, processor.n_samples)
    mask = (torch.arange(mel.shape[1]) < _frames_of(processor, heard)).long()
    return {"input_features": mel[None], "feature_attention_mask": mask[None]}


def _qwen2_audio_features(base: Any, inputs: Inputs) -> Levels:
    """As ``Qwen2AudioModel.forward``, which has no method for it: padding is masked, then cut off."""
    tower, mel = base.audio_tower, inputs["input_features"]  # [recordings, bins, frames]
    positions, rows = tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))
    places = torch.arange((mel.shape[-1] - 2) // 2 + 1, device=mel.device)
    mask = masking_utils.create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=mel.new_zeros(len(mel), len(places), 1),
        attention_mask=(places < positions[:, None]).long(),
    )
    features = base.multi_modal_projector(tower(mel, attention_mask=mask).last_hidden_state)
    return [[recording[:count] for recording, count in zip(features, rows.tolist(), strict=True)]]


def _voxtral(processor: Any, samples: np.ndarray, plan: ItemPlan) -> Inputs:
    """Windows of 30 seconds, the last one padded with silence; mel frames are those of the whole recording."""
    heard, window = samples[: plan.samples], processor.n_samples
    mel = log_mel(processor, heard, -(-len(heard) // window) * window)
    return {"input_features": mel.reshape(len(mel), -1, processor.nb_max_frames).transpose(0, 1)}  # [windows, bins, frames]


def _voxtral_features(base: Any, inputs: Inputs) -> Levels:
    windows = inputs["input_features"]
    rows = base.get_audio_features(windows, return_dict=True).pooler_output  # [windows x rows, hidden]
    return [rows.unflatten(0, (len(windows), -1))]


def _windows_of(inputs: Inputs) -> int:
    return inputs["input_features"].shape[0]


def _omni(processor: Any, samples: np.ndarray, plan: ItemPlan) -> Inputs:
    """Frames without their padding, behind one another: the tower parts them by their number."""
    heard = samples[: min(plan.samples, processor.n_samples)]
    frames = _frames_of(processor, heard)
    mel = log_mel(processor, heard, min(processor.n_samples, (frames + 2) * processor.hop_length))
    return {"frames": mel.T[:frames].contiguous(), "counts": torch.tensor([frames])}  # [frames, bins], [1]


def _omni_features(base: Any, inputs: Inputs) -> Levels:
    positions, rows = base.audio_tower._get_feat_extract_output_lengths(inputs["counts"])
    output = base.audio_tower(inputs["frames"].T, feature_lens=inputs["counts"], aftercnn_lens=positions)
    return [output.last_hidden_state.split(rows.tolist())]


def _omni_window(config: Any) -> int:
    """Frames that the tower looks at together. Pooling joins two positions, each of two frames, so a cut falls between fours."""
    window = 2 * int(config.audio_config.n_window)
    return window if window % 4 == 0 else 2 * window


def _omni_units(inputs: Inputs, config: Any) -> int:
    """Windows; what is left over belongs to the last, as it may be too short for a row of its own."""
    return max(1, len(inputs["frames"]) // _omni_window(config))


def _omni_take(inputs: Inputs, config: Any, start: int, stop: int) -> Inputs:
    frames, window = inputs["frames"], _omni_window(config)
    taken = frames[start * window : stop * window if stop < _omni_units(inputs, config) else None]
    return {"frames": taken, "counts": inputs["counts"].new_tensor([len(taken)])}


AUDIO = {
    "qwen2_audio": Scheme(_qwen2_audio, _qwen2_audio_features),
    "voxtral": Scheme(_voxtral, _voxtral_features, entries=_windows_of, cut=FIRST_EXTENT),
    "qwen2_5_omni_thinker": Scheme(_omni, _omni_features, cut=Cut(_omni_units, _omni_take)),
}
